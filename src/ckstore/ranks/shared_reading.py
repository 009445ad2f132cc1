"""The ranks of one host read a checkpoint together: a chunk that several of them need is read and decoded once.

Before the first byte of a destination changes, all ranks of the job meet. If one of them cannot restore, none reads.
Then the ranks of each host tell each other, in shared memory, which chunks they need, and each computes the same answer
to who reads what. A reader passes decoded chunks to the others through slots in that memory (``host_memory.py``).

Invariants:
- Sharing never decides whether a restore succeeds. Whatever a rank does not get from another, it reads itself.
- All ranks ask the same questions, whatever happens on one of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckstore.format.manifest import Manifest
from ckstore.format.records import decode_inner, encode_inner
from ckstore.hashing import digest_of
from ckstore.processes import boot_identity, proc_is_ours
from ckstore.ranks.host_memory import HostMemory, SlotTaker, SlotWriter
from ckstore.ranks.readers import readers_of
from ckstore.restore.plan import targets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckstore.ranks.link import Link
    from ckstore.restore.restore import ChunkFiller

_KEY_NBYTES = 12
_REFUSED = b"refused"


class OtherRankError(Exception):
    """Another rank cannot restore. Its error is in the outcome of the job."""


class _Member(NamedTuple):
    """A rank, and a memfd of it.

    Args:
        key: Equal for ranks that can share memory and restore the same manifest. Empty: this one cannot share.
        pid: Its process.
        fd: The memfd.
    """

    key: bytes
    pid: int
    fd: int


class _Group(NamedTuple):
    """Ranks of one host, and the memfd of the first of them."""

    pid: int
    fd: int
    ranks: tuple[int, ...]


class SharedReading:
    """One restore of a job, on this rank. Call ``read`` or ``refuse`` on every rank.

    Args:
        link: The connection to the other ranks.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._has_asked = False

    def refuse(self) -> None:
        """Tell the others that this rank failed before it could read. Without effect after ``read``."""
        if not self._has_asked:
            self._has_asked = True
            self._link.agree("restore (reading)", b"", _groups, is_patient=True)

    def read(
        self,
        manifest: Manifest,
        storages: Sequence[int],
        filler: ChunkFiller,
        read_chunks: Callable[[Container[int] | None], None],
    ) -> None:
        """Fill all destinations of some storages. See ``ChunkSharing``.

        Raises:
            OtherRankError: Another rank called ``refuse``.
            RankError: A rank was lost.
        """
        # A repetition, after packs were replaced, concerns this rank alone.
        memory = None if self._has_asked else self._joined(manifest, storages)
        if memory is None:
            read_chunks(None)
            return
        # However this ends, the others must know that they get nothing more from here.
        with contextlib.closing(memory):
            missing: Container[int] | None = None
            readers = readers_of(manifest, memory.read_needs())
            if readers is not None and _has_slots(memory, manifest, readers):
                missing = _read_together(memory, readers, manifest, storages, filler, read_chunks)
        if missing is None or missing:
            read_chunks(missing)

    def _joined(self, manifest: Manifest, storages: Sequence[int]) -> HostMemory | None:
        """Return the memory of this host, after all of its ranks have written what they need; None: read alone."""
        with _memory_file() as fd:
            member = _Member(b"", 0, 0) if fd is None else _Member(_key_of(manifest), os.getpid(), fd)
            self._has_asked = True
            answer = self._link.agree("restore (reading)", encode_inner(member), _groups, is_patient=True)
            if answer == _REFUSED:
                raise OtherRankError
            groups = decode_inner(answer, list[_Group])
            if not groups:
                return None
            own = next((group for group in groups if self._link.rank in group.ranks), None)
            value = b""
            try:
                memory = None if own is None else self._opened(own, manifest, storages)
                value = b"\1" if memory else b"\0"
            finally:
                # What a rank needs is written before it asks, and read after the answer. All ranks ask, whatever
                # happens: the others wait for this one as long as it lives.
                opened = self._link.agree("restore (memory)", value, _joined_or_refused, is_patient=True)
        if opened == _REFUSED:
            raise OtherRankError
        if own is not None and memory is not None and all(opened[rank] for rank in own.ranks):
            return memory
        return None

    def _opened(self, group: _Group, manifest: Manifest, storages: Sequence[int]) -> HostMemory | None:
        """Open the memory of this host, and write into it which chunks this rank needs; None: it cannot be opened."""
        link = self._link
        try:
            fd = os.open(f"/proc/{group.pid}/fd/{group.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                own = group.ranks.index(link.rank)
                count = len(manifest.chunks)
                memory = HostMemory(fd, len(group.ranks), own, count, lambda: link.is_broken)
            finally:
                os.close(fd)
        except (OSError, MemoryError):
            return None
        pieces = (piece.chunk for storage in storages for piece in manifest.storages[storage].pieces)
        memory.write_needs(np.unique(np.fromiter(pieces, np.int64)))
        return memory


def _key_of(manifest: Manifest) -> bytes:
    header = manifest.header
    facts = [boot_identity(), os.getuid(), header.run, header.seq, header.generation, header.checkpoint_id]
    return digest_of(encode_inner(facts))[:_KEY_NBYTES]


@contextlib.contextmanager
def _memory_file() -> Iterator[int | None]:
    """Make a memfd that other processes can open through /proc; None: this system cannot."""
    fd = None
    if boot_identity() and proc_is_ours():
        with contextlib.suppress(OSError, AttributeError):
            fd = os.memfd_create("ckstore-reading", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _joined_or_refused(values: tuple[bytes, ...]) -> bytes:
    return b"".join(values) if all(values) else _REFUSED


def _groups(values: tuple[bytes, ...]) -> bytes:
    """Rank 0: return the groups of ranks that share memory."""
    if not all(values):
        return _REFUSED
    members = [decode_inner(value, _Member) for value in values]
    by_key: dict[bytes, list[int]] = {}
    for rank, member in enumerate(members):
        if member.key:
            by_key.setdefault(member.key, []).append(rank)
    groups = [ranks for ranks in by_key.values() if len(ranks) > 1]
    return encode_inner([_Group(members[ranks[0]].pid, members[ranks[0]].fd, tuple(ranks)) for ranks in groups])


def _has_slots(memory: HostMemory, manifest: Manifest, readers: NDArray[np.int16]) -> bool:
    longest = max(manifest.chunks[chunk].nbytes for chunk in np.flatnonzero(readers >= 0).tolist())
    try:
        memory.open_slots(longest)
    except OSError:
        return False
    return True


def _read_together(
    memory: HostMemory,
    readers: NDArray[np.int16],
    manifest: Manifest,
    storages: Sequence[int],
    filler: ChunkFiller,
    read_chunks: Callable[[Container[int] | None], None],
) -> frozenset[int]:
    """Read this rank's chunks, pass them to the others, and take theirs. Return those that it did not get."""
    needed = memory.needs[memory.own]
    is_own = needed & ((readers == memory.own) | (readers < 0))
    others = np.flatnonzero(needed & ~is_own).tolist()
    targets = targets_of(manifest, storages, frozenset(others))
    expected = {chunk: int(readers[chunk]) for chunk in others}
    writer = SlotWriter(memory, readers)
    taker = SlotTaker(memory, expected, lambda chunk, plain: filler.fill_decoded(plain, targets[chunk]))
    try:
        filler.on_chunk = writer.write
        read_chunks(frozenset(np.flatnonzero(is_own).tolist()))
        writer.end()
        return frozenset(taker.missing())
    finally:
        filler.on_chunk = None
        writer.end()
        taker.stop()
