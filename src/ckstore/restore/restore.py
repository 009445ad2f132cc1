"""Restore a checkpoint into prepared destinations.

No stored byte is trusted: a chunk is accepted only if its BLAKE3 is the one in the manifest. For a chain of bases, only
the last chunk is hashed. If its digest is wrong, every frame of the chain is checked to find the damaged one.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ckstore.codec import kernels
from ckstore.codec.frame_decoder import Check, Expected
from ckstore.concurrency import collector_paused
from ckstore.config import MIB, Policy
from ckstore.delta.chain_reader import ChainReader, locate_error
from ckstore.errors import (
    ChecksumError,
    CkstoreError,
    CorruptError,
    MalformedError,
    MissingChunkError,
    UnsupportedError,
)
from ckstore.format.manifest import Manifest, tensor_paths
from ckstore.format.many_ranks import plain_manifest
from ckstore.hashing import ChunkId
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.restore.own_part import RankPlace, own_part
from ckstore.restore.plan import BufferedRead, FrameRead, Target, base_id_of, chain_of, narrowed, packs_of, plan_restore
from ckstore.restore.reader import DecodeTools, decode_all
from ckstore.results import require_exact
from ckstore.state.capture import loaded_adapters
from ckstore.state.memory import address_of, allocate
from ckstore.state.placement import libraries_needed, prepare_restore
from ckstore.state.tensors import LeafAdapter
from ckstore.store.damage import require_complete
from ckstore.store.memory_budget import read_buffer_nbytes
from ckstore.store.pack_reader import distant_packs
from ckstore.store.refs import Reference, load_whole, newest_whole, resolve
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What the caller asked for, except which checkpoint; the fields are arguments of ``Store.restore``."""

    into: Any
    only: str | Sequence[str] | None
    device: Any
    exact: bool
    on_progress: Callable[[int, int], None] | None
    rank: RankPlace | None = None
    """This process's place among the ranks of a job; None: it is the only one."""
    sharing: ChunkSharing | None = None
    """How the ranks of a host read together; None: each reads alone."""
    train_until: Callable[[Any, int], Any] | None = None
    """The user's training code, for a checkpoint in replay form; see ``ops/replay_form.py``."""
    skipped: list[str] = field(default_factory=list)
    """Warnings about newer points that could not be restored; they become those of the restored checkpoint."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored state, and the checkpoint it came from.

    Attributes:
        state: The state.
        manifest: The checkpoint; only the requested leaves where ``only`` was given.
        warnings: Why newer checkpoints were skipped, and what did not fit exactly.
        base: What the next commit is coded against, if that is another checkpoint.
    """

    state: Any
    manifest: Manifest
    warnings: tuple[str, ...]
    base: Manifest | None = None


def restore_reference(
    repository: Repository, policy: Policy, ref: Reference | None, request: RestoreRequest, started: list[int]
) -> Restored:
    """Restore the checkpoint that a reference names; retry if it was replaced in the meantime.

    Args:
        repository: The store and run.
        policy: Threads, memory and checks.
        ref: The checkpoint; None: the newest whole one.
        request: What to restore, and into what.
        started: The seq of each checkpoint whose data is about to be read is appended here, for error handling.

    Raises:
        CkstoreError: As for ``Store.restore``.
    """
    last: tuple[int, int] | None = None
    while True:
        manifest, skipped = _choose(repository, ref)
        started.append(manifest.header.seq)
        try:
            return restore_manifest(repository, policy, manifest, skipped, request)
        except MissingChunkError:
            # A demotion or repack may have replaced the checkpoint, and gc freed its packs, since the manifest was
            # read. Read it again; give up if it is the same one.
            found = (manifest.header.seq, manifest.header.generation)
            if found == last:
                raise
            last = found


def restore_manifest(
    repository: Repository, policy: Policy, manifest: Manifest, skipped: Sequence[str], request: RestoreRequest
) -> Restored:
    """Restore one checkpoint.

    Args:
        repository: The store and run.
        policy: Threads, memory and checks.
        manifest: The checkpoint.
        skipped: Why newer checkpoints were skipped.
        request: What to restore, and into what.

    Raises:
        CkstoreError: As for ``Store.restore``.
    """
    require_stored(manifest, repository.backend.root)
    if request.exact:
        require_exact(manifest.header, repository.backend.root)
    plain = plain_manifest(manifest)
    if request.only is not None:
        plain = narrowed(plain, request.only)
    adapters = _adapters(needs_torch="torch" in libraries_needed(plain.tree, plain.tensors), rank=request.rank)
    plain, notes = own_part(manifest, plain, request.rank, request.into, adapters)
    with collector_paused():
        targets = prepare_restore(
            plain.tree,
            plain.tensors,
            plain.storages,
            into=request.into,
            only=request.only,
            device=request.device,
            adapters=adapters,
        )
    tensors, storages = targets.tables
    placed = replace(plain, tensors=tensors, storages=storages)
    state = restore(repository, placed, targets, policy, on_progress=request.on_progress, sharing=request.sharing)
    warnings = (*notes, *targets.warnings)
    for sentence in warnings:
        _log.warning("%s", sentence)
    # A whole checkpoint is the base of the next commit, as it was stored.
    return Restored(state, manifest if request.only is None else plain, (*request.skipped, *skipped, *warnings))


def read_storage(repository: Repository, policy: Policy, manifest: Manifest, index: int) -> NDArray[np.uint8]:
    """Return the bytes of one storage of a checkpoint.

    Raises:
        CkstoreError: As for ``Store.restore``.
    """
    placement = _OneStorage(index, manifest.storages[index].nbytes)
    return restore(repository, manifest, placement, policy)  # type: ignore[no-any-return]


class _OneStorage:
    """A buffer for one storage; a ``Placement``."""

    keeps_all = True

    def __init__(self, index: int, nbytes: int) -> None:
        self.storages = [index] if nbytes else []
        self._memory = allocate(nbytes)

    def destination(self, storage: int) -> memoryview:
        """Return the buffer."""
        return self._memory.data

    def addresses(self, storages: Iterable[int]) -> list[int]:
        """Return the address of the buffer."""
        return [address_of(self._memory) for _ in storages]

    def complete(self, *storages: int) -> None:
        """There is nothing to do."""

    def finish(self) -> NDArray[np.uint8]:
        """Return the buffer."""
        return self._memory


def _choose(repository: Repository, ref: Reference | None) -> tuple[Manifest, list[str]]:
    """Return the checkpoint to restore, and why newer ones were skipped."""
    if not str(ref).startswith(("seq:", "id:")):
        # Any other reference may mean a checkpoint that a saver is about to publish.
        repository.wait_for_orphan()
    if ref is not None:
        return load_whole(repository, resolve(repository, ref), takes_lower=True), []
    manifest, skipped = newest_whole(repository)
    for sentence in skipped:
        _log.warning("%s", sentence)
    return manifest, skipped


def _adapters(*, needs_torch: bool, rank: RankPlace | None) -> list[LeafAdapter]:
    """Return the tensor libraries that are loaded; load torch first if the checkpoint needs it and it is installed."""
    if needs_torch and importlib.util.find_spec("torch"):
        importlib.import_module("torch")
    if rank is None or "torch" not in sys.modules:
        return loaded_adapters()
    from ckstore.state.shard_adapters import ShardRestoreAdapter

    return [ShardRestoreAdapter()]


class Placement(Protocol):
    """Destinations for storages. ``RestoreTargets`` is one; ``ranks`` has others, for boxes of tensors."""

    @property
    def storages(self) -> list[int]:
        """Indices of the storages to read, in the order in which their memory is allocated."""
        ...

    @property
    def keeps_all(self) -> bool:
        """Whether every destination is the final place of its bytes."""
        ...

    def destination(self, storage: int) -> memoryview:
        """Return writable memory for the whole storage; later calls return the same memory."""
        ...

    def addresses(self, storages: Iterable[int]) -> list[int]:
        """Return the address of each destination; it is valid until ``complete``."""
        ...

    def complete(self, *storages: int) -> None:
        """Record that the destinations are filled."""
        ...

    def finish(self) -> Any:
        """Return the state; every storage is complete."""
        ...


class ChunkFiller(Protocol):
    """Fills the destinations of chunks."""

    on_chunk: Callable[[int, memoryview], None] | None
    """Called on the decoding threads with the plain bytes of each chunk that was read from the store."""

    def fill_decoded(self, plain: memoryview, targets: Sequence[Target]) -> None:
        """Copy the plain bytes of a chunk to its targets. Thread-safe."""
        ...


class ChunkSharing(Protocol):
    """How processes that restore one checkpoint read it together. ``ranks/shared_reading.py`` is one."""

    def read(
        self,
        manifest: Manifest,
        storages: Sequence[int],
        filler: ChunkFiller,
        read_chunks: Callable[[Container[int] | None], None],
    ) -> None:
        """Fill all destinations of some storages.

        Args:
            manifest: The checkpoint.
            storages: Indices of the storages.
            filler: Fills their destinations.
            read_chunks: Reads chunks of the storages from the store; None: all of them.
        """
        ...


WAVE_NBYTES = 256 * MIB
"""Size of a wave, in bytes. It bounds the host buffers of storages that are copied on to a device or a live tensor."""


def restore(
    repository: Repository,
    manifest: Manifest,
    placement: Placement,
    policy: Policy,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    sharing: ChunkSharing | None = None,
) -> Any:
    """Fill every destination of ``placement`` from the store, and return the state.

    Args:
        repository: The store.
        manifest: The checkpoint.
        placement: The destinations.
        policy: Threads, memory and checks.
        on_progress: Called with bytes restored and bytes in total, from any thread.
        sharing: How the ranks of a host read together; None: this process reads all that it needs.

    Raises:
        CorruptError: Stored bytes are not the committed ones; the error names pack, offset and a tensor.
        MissingChunkError: A pack is missing.
        UnsupportedError: A frame needs a codec of a newer version.
    """
    require_complete(manifest, placement.storages)
    filler = _DestinationFiller(repository, manifest, placement, policy.verify_restored, on_progress)

    def read_chunks(chunks: Container[int] | None) -> None:
        _read_chunks(repository, manifest, placement, policy, filler, chunks)

    if sharing is None:
        read_chunks(None)
    else:
        sharing.read(manifest, placement.storages, filler, read_chunks)
    return placement.finish()


def _read_chunks(
    repository: Repository,
    manifest: Manifest,
    placement: Placement,
    policy: Policy,
    filler: _DestinationFiller,
    chunks: Container[int] | None,
) -> None:
    """Fill the destinations of some chunks from the store; None: of all chunks."""
    with collector_paused():
        plan = plan_restore(
            manifest,
            placement.storages,
            # Direct I/O adds a page at both ends.
            group_nbytes_max=read_buffer_nbytes(repository.limits) - 2 * PAGE_NBYTES,
            wave_nbytes=None if placement.keeps_all else WAVE_NBYTES,
            distant=distant_packs(repository, manifest.packs),
            chunks=chunks,
        )
    for read in plan.reads:
        if read.master is not None:
            filler.keep_until_read(read.master.storage)
    try:
        decode_all(repository, plan, manifest.packs, packs_of(manifest, plan), filler, policy=policy)
    except CorruptError:
        repository.tiers.forget_ranges(manifest.packs)
        raise


_MANY_TARGETS = 16
"""From this number of targets on, one call with a table of addresses is faster than a call for each target."""


def _columns_of(targets: Sequence[Target]) -> NDArray[np.int64]:
    """Return the fields of all targets, (4, n)."""
    fields = np.fromiter(chain.from_iterable(targets), np.int64, 4 * len(targets))
    columns: NDArray[np.int64] = fields.reshape(-1, 4).T
    return columns


class _DestinationFiller:
    """Decodes frames into destinations, and completes each storage when all its bytes are there."""

    def __init__(
        self,
        repository: Repository,
        manifest: Manifest,
        placement: Placement,
        check: Check,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._repository = repository
        self._manifest = manifest
        self._placement = placement
        self._check = check
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._nbytes = np.fromiter((spec.nbytes for spec in manifest.storages), np.int64, len(manifest.storages))
        self._missing = self._nbytes.copy()
        self._total = sum(self._nbytes[placement.storages].tolist())
        self._done = 0
        self.on_chunk: Callable[[int, memoryview], None] | None = None

    def keep_until_read(self, storage: int) -> None:
        """Delay the completion of a storage until one more chunk has been decoded from its bytes."""
        self._missing[storage] += 1

    def fill(self, read: FrameRead, frame: memoryview, tools: DecodeTools) -> None:
        """Decode a frame to its first place, on top of its base, and copy it to the other places and targets."""
        plain = self._at(read.places[0]) if read.places else tools.decoder.own_buffer(read.nbytes)
        base = None
        if read.ref.base >= 0:
            base = plain if read.master is None else self._at(read.master)
        is_end = bool(read.targets)
        # A frame that is only a base is verified with the chunk that is decoded on top of it.
        check: Check = "none" if not is_end and self._check == "blake3" else self._check
        expected = Expected(read.ref.chunk_id, read.nbytes, base_id_of(self._manifest, read.frame))
        try:
            tools.decoder.decode(frame, expected, plain, base=base, check=check)
        except (ChecksumError, MalformedError, UnsupportedError) as error:
            raise self._damage_error(error, read, tools) from error
        for place in read.places[1:]:
            kernels.copy_bytes(plain, self._at(place))
        if is_end and self.on_chunk is not None:
            self.on_chunk(read.chunk, plain)
        self._spread(plain, read.targets, filled=read.places[:1])
        if read.master is not None:
            self._count(read.master.storage, 1, state_nbytes=0)

    def fill_buffered(self, read: BufferedRead, tools: DecodeTools) -> None:
        """Read a chunk with its chain into a scratch buffer, and copy it to its targets."""
        plain = tools.decoder.own_buffer(read.nbytes)
        try:
            tools.reader.read(chain_of(self._manifest, read.frame), read.nbytes, plain)
        except CkstoreError as error:
            raise self._with_tensor(error, read.chunk) from error
        if self.on_chunk is not None:
            self.on_chunk(read.chunk, plain)
        self._spread(plain, read.targets, filled=())

    def fill_decoded(self, plain: memoryview, targets: Sequence[Target]) -> None:
        """Copy the plain bytes of a chunk to its targets, and count their bytes."""
        self._spread(plain, targets, filled=())

    def _spread(self, plain: memoryview, targets: Sequence[Target], *, filled: Sequence[Target]) -> None:
        """Copy a chunk to its targets, except those already filled, and count their bytes."""
        if len(targets) >= _MANY_TARGETS:
            self._spread_to_many(plain, targets, filled)
        else:
            for target in targets:
                if target not in filled:
                    kernels.copy_bytes(
                        plain[target.chunk_offset : target.chunk_offset + target.nbytes], self._at(target)
                    )
            for target in targets:
                self._count(target.storage, target.nbytes, state_nbytes=target.nbytes)
        if targets and self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def _spread_to_many(self, plain: memoryview, targets: Sequence[Target], filled: Sequence[Target]) -> None:
        """Copy a chunk to its targets with one call of a kernel, and count their bytes."""
        storages, positions, offsets, nbytes = _columns_of(targets)
        if (offsets + nbytes > len(plain)).any() or (positions + nbytes > self._nbytes[storages]).any():
            # The manifest was checked. Copying does not rely on it.
            raise AssertionError("a target reaches beyond its chunk or storage")
        with self._lock:
            starts = np.array(self._placement.addresses(storages.tolist()), np.int64)
        source = np.frombuffer(plain, np.uint8)
        table = np.stack((source.__array_interface__["data"][0] + offsets, starts + positions, nbytes), axis=1)
        table[[index for index, target in enumerate(targets) if target in filled] if filled else [], 2] = 0
        unit, mark = np.array([0, len(table)], np.uint64), np.zeros(1, np.uint8)
        kernels.copy_units(table.astype(np.uint64).data, unit.data, mark.data, np.zeros(1, np.uint64).data, -1)
        with self._lock:
            np.subtract.at(self._missing, storages, nbytes)
            self._done += int(nbytes.sum())
            complete = np.unique(storages[self._missing[storages] == 0]).tolist()
        self._placement.complete(*complete)

    def _at(self, target: Target) -> memoryview:
        with self._lock:
            whole = self._placement.destination(target.storage)
        return whole[target.storage_offset : target.storage_offset + target.nbytes]

    def _count(self, storage: int, count: int, *, state_nbytes: int) -> None:
        with self._lock:
            self._missing[storage] -= count
            self._done += state_nbytes
            is_complete = self._missing[storage] == 0
        if is_complete:
            self._placement.complete(storage)

    def _damage_error(self, error: CkstoreError, read: FrameRead, tools: DecodeTools) -> CkstoreError:
        """Return the error for the damaged frame, which may be a base of the frame that failed."""
        frame_of = {frame.chunk_id: index for index, frame in enumerate(self._manifest.frames)}
        chain = chain_of(self._manifest, frame_of[ChunkId(self._manifest.chunks[read.chunk].chunk_id)])
        if len(chain) == 1:
            return self._with_tensor(locate_error(error, self._repository, chain, 0), read.chunk)
        # With its own buffer: all fetch buffers may be in use until this thread returns its buffer.
        with ChainReader(self._repository, tools.decoder) as reader:
            return self._with_tensor(reader.blame(chain, self._manifest.chunks[read.chunk].nbytes, error), read.chunk)

    def _with_tensor(self, error: CkstoreError, chunk: int) -> CkstoreError:
        """Return the error with the checkpoint and an affected tensor added to its message."""
        tensor = next(iter(tensor_paths(self._manifest, {chunk}, count_max=1)), "(none)")
        header = self._manifest.header
        return type(error)(
            error.what,
            where=f"{error.where}, tensor {tensor}, step {header.step} (seq {header.seq}) of run {header.run!r} "
            f"in {self._repository.backend.root}",
            todo=error.todo or "restore an older checkpoint or another copy; `ckstore verify` lists all damage",
            **{**error.facts, "tensor": tensor},
        )
