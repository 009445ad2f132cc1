"""What the audits of one verify share: what is needed, what is found, how frames are checked, when to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckstore.config import READ_BUFFERS, READ_BUFFERS_MIN, Policy, fit_memory
from ckstore.format import layout
from ckstore.format.frame import FrameHeader
from ckstore.ids import PackId
from ckstore.io.backend import Backend
from ckstore.store.damage import Damage, Place, Report, Sufferers, Uses, label_of
from ckstore.store.known import LOCAL_TIER, LOST_TIER
from ckstore.store.parts import Parts


class FrameCheck(Protocol):
    """Decodes a payload and compares the identity of what comes out; raises CorruptError."""

    def __call__(self, header: FrameHeader, payload: memoryview, base: memoryview | None = None, /) -> memoryview:
        """Return the plain bytes, which last until the next call; they lie where ``base`` lay if it was as long."""
        ...


@dataclass(slots=True)
class Stop:
    """Why to end before everything was looked at: the first failure of the checking itself."""

    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first one."""
        self.error = self.error or error


@dataclass(slots=True, eq=False)
class Audit:
    """One verify.

    Args:
        parts: The store.
        uses: What the manifests need.
        report: What is found.
        make_check: Makes, for each thread, what decodes a frame.
        check_nbytes: Memory that what ``make_check`` makes may use.
        policy: How many threads, and how much memory for them and for read buffers.
        tell: Called after each read, and each pack.
        is_partial: Only some checkpoints are looked at, so that damage no one of them suffers is left out.
        is_remote: Packs of other tiers are looked at, where they lie there and not here.
    """

    parts: Parts
    uses: Uses
    report: Report
    make_check: Callable[[], FrameCheck]
    check_nbytes: int
    policy: Policy
    tell: Callable[[], None]
    is_partial: bool
    is_remote: bool = False
    stop: Stop = field(default_factory=Stop)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _damaged: set[tuple[PackId, Place]] = field(default_factory=set)
    _sufferers: Sufferers = field(init=False)

    def __post_init__(self) -> None:
        self._sufferers = Sufferers(self.parts)

    def fit(self, buffer_nbytes: int, *, check_nbytes: int | None = None) -> tuple[int, int]:
        """Return how many threads and buffers the policy's memory holds."""
        return fit_memory(
            self.policy.thread_count,
            self.check_nbytes if check_nbytes is None else check_nbytes,
            buffer_nbytes,
            buffers_wanted=READ_BUFFERS,
            buffers_min=READ_BUFFERS_MIN,
            memory_nbytes_max=self.policy.memory_nbytes_max,
        )

    def add(
        self,
        pack_id: PackId,
        what: str,
        offset: int | None = None,
        place: Place | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Add damage, of one frame or of all of a pack, with the checkpoints that need it; ``error`` as it came."""
        uses = self.uses.packs[pack_id]
        hit = list(uses.refs) if place is None else uses.places.get(place, [])
        if self.is_partial and not hit:
            # A frame that only other checkpoints need, in a pack that this one shares with them.
            return
        where = self.home_of(pack_id).location_of(layout.pack_name(pack_id))
        if offset is not None:
            where = f"{where}, offset {offset}"
        checkpoints = tuple(label_of(self.uses.names[index]) for index in hit)
        with self.lock:
            if place is not None:
                self._damaged.add((pack_id, place))
            tensors = self._tensors_of(hit, pack_id, place)
            self.report.add(Damage(what, where, checkpoints, tensors), error)

    def home_of(self, pack_id: PackId) -> Backend:
        """Return where a pack lies as manifests say: here, if one of them says so."""
        tiers = {ref.tier for ref in self.uses.packs[pack_id].refs.values()}
        if tiers & {LOCAL_TIER, LOST_TIER}:
            return self.parts.backend
        return self.parts.tiers.open(min(tiers))

    def is_damaged(self, pack_id: PackId, place: Place) -> bool:
        """Whether damage of this frame was found already."""
        return (pack_id, place) in self._damaged

    def _tensors_of(self, hit: list[int], pack_id: PackId, place: Place | None) -> tuple[str, ...]:
        if not hit:
            return ()
        name = self.uses.names[hit[0]]
        if place is None:
            return self._sufferers.of_pack(name, pack_id)
        return self._sufferers.of_frame(name, place[0])
