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
from pathlib import Path
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
_MEMORY_NAME = "ckstore-reading"


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
        self._asked = 0

    def refuse(self) -> None:
        """Ask what this rank has not asked yet, to tell the others that it cannot read. Without effect after ``read``.

        It may have failed while it waited for an answer, which the others have got.
        """
        while self._asked < len(_QUESTIONS):
            # All ranks get this error, and ask the other questions, too.
            with contextlib.suppress(Exception):
                self._ask(b"")

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
        memory = None if self._asked else self._joined(manifest, storages)
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
            answer = self._ask(encode_inner(member))
            if answer == _REFUSED:
                self.refuse()
                raise OtherRankError
            own = next((group for group in decode_inner(answer, list[_Group]) if self._link.rank in group.ranks), None)
            memory = None if own is None else self._opened(own, manifest, storages)
            try:
                # What a rank needs is written before it asks, and read after the answer.
                opened = self._ask(b"\1" if memory else b"\0")
            except BaseException:
                # The others may have got the answer, and would wait for what this rank reads.
                if memory is not None:
                    memory.close()
                raise
        if opened == _REFUSED:
            raise OtherRankError
        if own is not None and memory is not None and all(opened[rank] for rank in own.ranks):
            return memory
        return None

    def _ask(self, value: bytes) -> bytes:
        """Ask the next question. An empty value: this rank cannot read."""
        topic, decide = _QUESTIONS[self._asked]
        self._asked += 1
        return self._link.agree(topic, value, decide, is_patient=True)

    def _opened(self, group: _Group, manifest: Manifest, storages: Sequence[int]) -> HostMemory | None:
        """Open the memory of this host, and write into it which chunks this rank needs; None: it cannot be opened."""
        link = self._link
        try:
            fd = os.open(f"/proc/{group.pid}/fd/{group.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                # Its rank may have closed it, and opened another file with this number.
                if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{_MEMORY_NAME}"):
                    return None
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
            fd = os.memfd_create(_MEMORY_NAME, os.MFD_CLOEXEC)
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


_QUESTIONS: Sequence[tuple[str, Callable[[tuple[bytes, ...]], bytes]]] = (
    ("restore (reading)", _groups),
    ("restore (memory)", _joined_or_refused),
)
"""Topics, and what decides the answers. All ranks ask all of them, in this order."""


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
