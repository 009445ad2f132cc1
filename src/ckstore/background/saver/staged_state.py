"""A staged state as a commit sees it: storages in a slot of the arena, read as soon as they are staged.

Invariants:
- A byte is read only after it was marked, or its slot said, to be staged; whoever needs one that is not waits for it.
- A ticket whose trainer has died, or that was aborted, before it was whole is given up: every reader of it raises.
- Nothing is published before the trainer has said that all is staged.

The head of a staged state: all that a commit wants to know of it, but for the bytes of its storages.

It lies in the slot that the state is staged in, because tree and tensors may be long; places are offsets in the slot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple, cast

from ckstore.background import protocol
from ckstore.background.arena import STAGED, Slot
from ckstore.background.saver.priority import keep_awake
from ckstore.clock import Clock
from ckstore.commit.base_selection import sampled_of, units_of
from ckstore.commit.chunking import StorageShape, plan_commit
from ckstore.config import Limits, Policy, policy_of, policy_row
from ckstore.errors import CkstoreError, MalformedError, SaverError
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner, encoded
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import Node, TreeWriter, decode_tree
from ckstore.io.backend import Backend
from ckstore.state.capture import Captured
from ckstore.store.lease import Lease


class StorageRow(NamedTuple):
    """A storage: where its bytes lie in the slot, and what they are."""

    place: Count
    nbytes: Count
    element_width: Count
    is_float: bool


class SampleRow(NamedTuple):
    """Bytes of a storage that are staged apart, before the storage itself, so that coding can begin early.

    ``bytes [offset, offset + nbytes)`` of the storage are told of. Where ``width`` is 0, they lie at ``place`` as they
    are; else ``place`` holds the sample that ``forms.sample_of`` takes of them for that width, ``sample_nbytes`` long.
    """

    storage: Count
    offset: Count
    nbytes: Count
    width: Count
    place: Count
    sample_nbytes: Count


class _HeadRow(NamedTuple):
    step: Count
    metrics: dict[str, float]
    tags: list[str]
    policy: dict[str, Any]
    warnings: list[str]
    tree: bytes
    tensors: list[TensorRow]
    storages: list[StorageRow]
    samples: list[SampleRow]


@dataclass(frozen=True, slots=True)
class Head:
    """What a staged state is, but for the bytes of its storages; places are offsets in the slot."""

    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    warnings: Sequence[str]
    tree: Node
    tensors: Sequence[TensorSpec]
    storages: Sequence[StorageRow]
    samples: Sequence[SampleRow] = ()


class HeadWriter:
    """Describes captured states and writes their heads, one after the other.

    What is the same as in the last one, by identity, is neither described nor encoded again.
    """

    def __init__(self) -> None:
        self._trees = TreeWriter()
        self._placed: tuple[object, object] = None, None
        self._storages: list[StorageRow] = []
        self._repository: tuple[object, ...] = ()
        self._rows: tuple[object, ...] = ()

    def head_of(
        self,
        captured: Captured,
        places: Sequence[int],
        *,
        step: int,
        metrics: Mapping[str, float],
        tags: Sequence[str],
        policy: Policy,
        samples: Sequence[SampleRow] = (),
    ) -> Head:
        """Describe a captured state whose storages are staged at these places."""
        if self._placed[0] is not captured.tensors or self._placed[1] is not places:
            self._storages = [
                StorageRow(place, storage.nbytes, storage.element_width, storage.is_float)
                for place, storage in zip(places, captured.storages, strict=True)
            ]
            self._placed = captured.tensors, places
        return Head(
            step, metrics, tags, policy, captured.warnings, captured.tree, captured.tensors, self._storages, samples
        )

    def encode(self, head: Head) -> bytes:
        """Return a head as it lies in the slot."""
        parts = head.tensors, head.storages, head.samples
        if len(self._repository) != len(parts) or not all(map(is_, parts, self._repository)):
            tensors = [_row_of(tensor) for tensor in head.tensors]
            self._rows = encoded(tensors), encoded(head.storages), encoded(head.samples)
            self._repository = parts
        tensor_rows, storage_rows, sample_rows = self._rows
        return encode_inner(
            _HeadRow(
                step=head.step,
                metrics=dict(head.metrics),
                tags=list(head.tags),
                policy=policy_row(head.policy),
                warnings=list(head.warnings),
                tree=self._trees.encode(head.tree),
                tensors=cast("list[TensorRow]", tensor_rows),
                storages=cast("list[StorageRow]", storage_rows),
                samples=cast("list[SampleRow]", sample_rows),
            )
        )


def decode_head(content: bytes | memoryview, *, slot_nbytes: int) -> Head:
    """Read a head whose places must lie within the slot.

    Raises:
        MalformedError: No trainer of ours wrote it.
    """
    where = "the head of a staged state"
    row = decode_inner(content, _HeadRow, where=where)
    for storage in row.storages:
        if storage.place + storage.nbytes > slot_nbytes:
            raise MalformedError("a staged storage reaches beyond the slot", where=where)
    for sample in row.samples:
        if (
            sample.place + sample.sample_nbytes > slot_nbytes
            or sample.storage >= len(row.storages)
            or sample.offset + sample.nbytes > row.storages[sample.storage].nbytes
            or (sample.width == 0 and sample.sample_nbytes != sample.nbytes)
        ):
            raise MalformedError("a staged sample reaches beyond the slot, or its storage", where=where)
    return Head(
        step=row.step,
        metrics=row.metrics,
        tags=row.tags,
        policy=policy_of(row.policy, where=where),
        warnings=row.warnings,
        tree=decode_tree(row.tree, tensor_count=len(row.tensors), where=where),
        tensors=[_tensor_of(tensor) for tensor in row.tensors],
        storages=row.storages,
        samples=row.samples,
    )


def _row_of(spec: TensorSpec) -> TensorRow:
    return TensorRow(
        library=spec.library,
        dtype=spec.dtype,
        shape=spec.shape,
        strides=spec.strides,
        storage=spec.storage,
        offset=spec.offset,
        is_parameter=spec.is_parameter,
        requires_grad=spec.requires_grad,
    )


def _tensor_of(row: TensorRow) -> TensorSpec:
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )


LOOK_SECONDS = 0.05
"""How often marks are looked at while somebody waits for them, should no bell have rung."""


@dataclass(frozen=True, slots=True)
class Held:
    """What was begun, as it stood when that was said.

    Args:
        message: What was said.
        is_granted: The trainer was seen alive when the lease was held already.
        is_late: The saver was ending.
    """

    message: protocol.Begin
    is_granted: bool
    is_late: bool


class StagingMonitor:
    """Where the threads of a commit wait for the trainer, and hear of its death."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.is_trainer_gone = False

    def tell(self) -> None:
        """Wake those who wait: something may have come."""
        with self._changed:
            self._changed.notify_all()

    def tell_gone(self) -> None:
        """Tell that the trainer is dead: what is staged now is all that ever will be."""
        with self._changed:
            self.is_trainer_gone = True
            self._changed.notify_all()

    def wait(self, has_come: Callable[[], bool]) -> None:
        """Wait until a condition holds; it may raise."""
        with self._changed:
            while not has_come():
                self._changed.wait(LOOK_SECONDS)


class Ticket:
    """One staged state, from its first byte to its receipt.

    Args:
        number: The trainer's number of it.
        slot: Where it is staged.
        head: What it is.
        board: Where its readers wait.
        parents: The seq that it comes from, and the ticket that it comes from if that is published; 0: none.
    """

    def __init__(
        self, number: int, slot: Slot, head: Head, board: StagingMonitor, *, parents: tuple[int | None, int] = (None, 0)
    ) -> None:
        self.number = number
        self.head = head
        self.parents = parents
        self.has_lease = False
        """Whether the lease was held for it while the trainer lived; only then it may outlive the trainer."""
        self.may_keep = False
        """Whether its slot may be read for the next commit, after this one has ended."""
        self.is_aborted = False
        """Whether the trainer has given it up."""
        self.nbytes_read = 0
        self.on_read: Callable[[], None] = lambda: None
        self._slot = slot
        self._bytes = slot.view(0, slot.nbytes).toreadonly()
        self._is_known_whole = False
        self._board = board
        samples: dict[int, list[SampleRow]] = {}
        for sample in head.samples:
            samples.setdefault(sample.storage, []).append(sample)
        self.storages = [StagedStorage(self, row, samples.get(index, ())) for index, row in enumerate(head.storages)]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages together."""
        return sum(storage.nbytes for storage in self.head.storages)

    @property
    def is_whole(self) -> bool:
        """Whether every byte is staged, and the trainer has said so."""
        return self._slot.ticket == self.number and self._slot.state == STAGED

    def note_staged(self) -> None:
        """Look whether it is whole, now that the trainer has said so: from then on no reader looks at marks."""
        self._is_known_whole = self.is_whole

    @property
    def is_coming(self) -> bool:
        """Whether the trainer is still copying it."""
        return not (self.is_whole or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """Whether it will not be published any more."""
        # First the trainer, then the slot: what it did before it died counts.
        is_gone = self._board.is_trainer_gone
        return self.is_aborted or (is_gone and not (self.has_lease and self.is_whole))

    @property
    def is_orphan(self) -> bool:
        """Whether it is to be published although its trainer is dead."""
        return self.has_lease and self._board.is_trainer_gone

    def abort(self) -> None:
        """Give it up, as the trainer asks."""
        self.is_aborted = True
        self._board.tell()

    def is_in(self, slot: Slot) -> bool:
        """Whether it is staged in this slot."""
        return self._slot is slot

    def leave(self) -> None:
        """Let go of the slot's memory: nobody reads it any more, but by views that were handed out."""
        self._bytes = memoryview(b"")

    def captured(self) -> Captured:
        """Return the state as a commit takes it."""
        head = self.head
        return Captured(head.tree, [], list(head.tensors), list(self.storages), list(head.warnings))

    def check(self) -> None:
        """Raise if it was given up.

        Raises:
            SaverError: It was.
        """
        if self.is_given_up:
            raise SaverError(
                f"the commit of step {self.head.step} was given up "
                + ("by the trainer" if self.is_aborted else "because the trainer died before it was staged"),
                todo="commit again",
            )

    def wait_whole(self) -> None:
        """Wait until all is staged.

        Raises:
            SaverError: It never will be.
        """
        self._wait(lambda: self.is_whole)

    def read(self, place: int, nbytes: int) -> memoryview:
        """Return bytes of the slot, once they are staged.

        Raises:
            SaverError: They never will be, or the ticket was given up meanwhile.
        """
        self.check()
        if not self.is_staged(place, nbytes):
            self._wait(lambda: self.is_staged(place, nbytes))
        return self._bytes[place : place + nbytes]

    def is_staged(self, place: int, nbytes: int) -> bool:
        """Whether bytes of the slot are there."""
        return self._is_known_whole or self._slot.is_staged(place, place + nbytes)

    def _wait(self, has_come: Callable[[], bool]) -> None:
        def look() -> bool:
            self.check()
            return has_come()

        self._board.wait(look)


Job = Ticket | protocol.Release | protocol.Forget | protocol.Warm
"""What the committing thread does, one after the other."""


class StagedStorage:
    """The bytes of one storage, some of which may still have to come."""

    def __init__(self, ticket: Ticket, row: StorageRow, samples: Sequence[SampleRow]) -> None:
        self.nbytes = row.nbytes
        self.element_width = row.element_width
        self.is_float = row.is_float
        self._ticket = ticket
        self._place = row.place
        self._samples = {(row.offset, row.nbytes, row.width): row for row in samples if row.width}
        self._excerpts = [row for row in samples if not row.width]

    @property
    def is_host(self) -> bool:
        """They lie in host memory."""
        return True

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``; waits for them."""
        assert 0 <= lo <= hi <= self.nbytes
        if lo == hi:
            return memoryview(b"")
        ticket = self._ticket
        if not ticket.is_staged(self._place + lo, hi - lo):
            for row in self._excerpts:
                if row.offset <= lo and hi <= row.offset + row.nbytes:
                    return ticket.read(row.place + lo - row.offset, hi - lo)
        ticket.nbytes_read += hi - lo
        ticket.on_read()
        return ticket.read(self._place + lo, hi - lo)

    def sample(self, offset: int, nbytes: int, width: int) -> bytes | None:
        """Return the sample of a chunk if it is staged apart: in one piece, and before the chunk itself."""
        row = self._samples.get((offset, nbytes, width))
        return None if row is None else bytes(self._ticket.read(row.place, row.sample_nbytes))


class GatedLease(Lease):
    """The lease of a saver: what it guards is published only when the gate lets it pass."""

    def __init__(self, backend: Backend, run: str, clock: Clock) -> None:
        super().__init__(backend, run, clock)
        self.gate: Callable[[], None] = lambda: None

    def _start_heart(self) -> None:
        super()._start_heart()
        # Whoever renews a lease waits for a beat that is being written.
        if self._heart is not None:
            keep_awake(self._heart)

    def release(self) -> None:
        """Give the lease up, also one that was lent and not adopted; never raises."""
        with contextlib.suppress(CkstoreError):
            self._record = self._read_transferred() or self._record
        super().release()

    def check_held(self) -> None:
        """Look at the lease again, whatever is staged.

        Raises:
            ConflictError: Another writer took it over.
        """
        super().check()

    def check(self) -> None:
        """Look at the lease again, before publishing, and wait until all is staged.

        Raises:
            ConflictError: Another writer took it over.
            SaverError: It never will be.
        """
        self.gate()
        super().check()


def places_to_sample(storages: Sequence[StorageShape], limits: Limits) -> list[tuple[int, int, int, int]]:
    """Return what a commit samples before it codes: storage, offset and length of a chunk, and its element width."""
    plan = plan_commit(storages, limits)
    found = []
    for unit in units_of(plan):
        for index in sampled_of(unit):
            chunk = plan.chunks[index]
            if len(chunk.sources) == 1:
                source = chunk.sources[0]
                found.append((source.storage, source.offset, source.nbytes, chunk.element_width))
    return found
