"""The story of a restore, stage by stage: a commit read backwards.

resolve -> plan -> open packs -> fetch -> decode and check -> place. Nothing is trusted on the way: a chunk
counts only when its BLAKE3 is the one the manifest names. Of a chain of bases that is the last chunk; when it is
not what it should be, every frame of the chain is judged alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckstore.codec import kernels
from ckstore.codec.frame_decoder import Check, Expected
from ckstore.config import MIB, Policy
from ckstore.delta.chain_reader import ChainReader, at_frame
from ckstore.errors import ChecksumError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.manifest import Manifest
from ckstore.hashing import ChunkId
from ckstore.restore.plan import BufferedRead, FrameRead, Target, base_id_of, chain_of, packs_of, plan_restore
from ckstore.restore.reader import Tools, decode_all, group_nbytes_max
from ckstore.state.placement import RestoreTargets
from ckstore.store.damage import require_complete, tensor_paths
from ckstore.store.pack_reader import distant_packs
from ckstore.store.repository import Repository

WAVE_NBYTES = 256 * MIB
"""Host memory of what does not stay on the host: so much of the state is brought to its end before more is begun."""


def restore(
    repository: Repository,
    manifest: Manifest,
    placement: RestoreTargets,
    policy: Policy,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Fill every destination of ``placement`` with what the manifest names, and return the state.

    Raises:
        CorruptError: Stored bytes are not what was committed; names pack, offset and a tensor.
        MissingChunkError: A pack is missing.
        UnsupportedError: A codec of a newer version is needed.
    """
    require_complete(manifest, placement.storages)
    plan = plan_restore(
        manifest,
        placement.storages,
        group_nbytes_max=group_nbytes_max(repository.limits),
        wave_nbytes=None if placement.keeps_all else WAVE_NBYTES,
        distant=distant_packs(repository, manifest.packs),
    )
    filler = _Filler(repository, manifest, placement, policy.verify_restored, on_progress)
    for read in plan.reads:
        if read.master is not None:
            filler.hold(read.master.storage)
    try:
        decode_all(repository, plan, manifest.packs, packs_of(manifest, plan), filler, policy=policy)
    except CorruptError:
        repository.tiers.forget_ranges(manifest.packs)
        raise
    return placement.finish()


class _Filler:
    """Decodes frames into destinations, and says when a storage has all its bytes."""

    def __init__(
        self,
        repository: Repository,
        manifest: Manifest,
        placement: RestoreTargets,
        check: Check,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._repository = repository
        self._manifest = manifest
        self._placement = placement
        self._check = check
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._missing = {index: manifest.storages[index].nbytes for index in placement.storages}
        self._total = sum(self._missing.values())
        self._done = 0

    def hold(self, storage: int) -> None:
        """Keep a storage where it is until one more chunk was made from it."""
        self._missing[storage] += 1

    def fill(self, read: FrameRead, frame: memoryview, tools: Tools) -> None:
        """Decode a frame to its first place, onto its base, and copy it to where else it goes."""
        plain = self._at(read.places[0]) if read.places else tools.decoder.own_buffer(read.nbytes)
        base = None
        if read.ref.base >= 0:
            base = plain if read.master is None else self._at(read.master)
        is_end = bool(read.targets)
        # What is only a base is proved by what is decoded on top of it.
        check: Check = "none" if not is_end and self._check == "blake3" else self._check
        expected = Expected(read.ref.chunk_id, read.nbytes, base_id_of(self._manifest, read.frame))
        try:
            tools.decoder.decode(frame, expected, plain, base=base, check=check)
        except (ChecksumError, MalformedError, UnsupportedError) as error:
            raise self._blamed(error, read, tools) from error
        for place in read.places[1:]:
            kernels.copy_bytes(plain, self._at(place))
        self._spread(plain, read.targets, is_there=read.places[:1])
        if read.master is not None:
            self._count(read.master.storage, 1, state_nbytes=0)

    def fill_buffered(self, aside: BufferedRead, tools: Tools) -> None:
        """Read a chunk through its chain, beside the state, and copy it to where it goes."""
        plain = tools.decoder.own_buffer(aside.nbytes)
        try:
            tools.reader.read(chain_of(self._manifest, aside.frame), aside.nbytes, plain)
        except CkstoreError as error:
            raise self._located(error, aside.chunk) from error
        self._spread(plain, aside.targets, is_there=())

    def _spread(self, plain: memoryview, targets: Sequence[Target], *, is_there: Sequence[Target]) -> None:
        """Copy a chunk to its targets, and count their bytes."""
        for target in targets:
            if target not in is_there:
                kernels.copy_bytes(plain[target.chunk_offset : target.chunk_offset + target.nbytes], self._at(target))
        for target in targets:
            self._count(target.storage, target.nbytes, state_nbytes=target.nbytes)
        if targets and self._on_progress is not None:
            self._on_progress(self._done, self._total)

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

    def _blamed(self, error: CkstoreError, read: FrameRead, tools: Tools) -> CkstoreError:
        """Return the error of the frame that is damaged, which need not be the one that was found to be wrong."""
        frame_of = {frame.chunk_id: index for index, frame in enumerate(self._manifest.frames)}
        chain = chain_of(self._manifest, frame_of[ChunkId(self._manifest.chunks[read.chunk].chunk_id)])
        if len(chain) == 1:
            return self._located(at_frame(error, self._repository, chain, 0), read.chunk)
        # With a buffer of its own: those of the fetching may all be held until this one is given back.
        with ChainReader(self._repository, tools.decoder) as reader:
            return self._located(reader.blame(chain, self._manifest.chunks[read.chunk].nbytes, error), read.chunk)

    def _located(self, error: CkstoreError, chunk: int) -> CkstoreError:
        """Return the error with the checkpoint and the tensor that suffers put into its message."""
        tensor = next(iter(tensor_paths(self._manifest, {chunk}, count_max=1)), "(none)")
        header = self._manifest.header
        return type(error)(
            error.what,
            where=f"{error.where}, tensor {tensor}, step {header.step} (seq {header.seq}) of run {header.run!r} "
            f"in {self._repository.backend.root}",
            todo=error.todo or "restore an older checkpoint or another copy; `ckstore verify` lists all damage",
            **{**error.facts, "tensor": tensor},
        )
