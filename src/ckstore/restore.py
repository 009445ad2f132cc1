"""The story of a restore, stage by stage: a commit read backwards.

resolve -> plan -> open packs -> fetch -> decode and check -> place. Nothing is trusted on the way: a chunk
counts only when its BLAKE3 is the one the manifest names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ckstore.config import Policy
from ckstore.errors import CkstoreError, CorruptError, UnsupportedError
from ckstore.fetch import decode_all, group_nbytes_max, split
from ckstore.format.manifest import Manifest
from ckstore.ids import ChunkId
from ckstore.pipeline import ChunkWorker, Expected
from ckstore.placement import Placement
from ckstore.plan import ChunkRead, FrameGroup, Target, plan_restore
from ckstore.store.damage import tensor_paths
from ckstore.store.parts import Parts


def restore(
    parts: Parts,
    manifest: Manifest,
    placement: Placement,
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
    groups = plan_restore(manifest, placement.storages, group_nbytes_max=group_nbytes_max(parts.limits))
    filler = _Filler(
        parts, manifest, placement, checks_identity=policy.verify_restored == "blake3", on_progress=on_progress
    )
    decode_all(parts, groups, manifest.packs, filler.decode, policy=policy)
    return placement.finish()


class _Filler:
    """Decodes frames into destinations, and says when a storage has all its bytes."""

    def __init__(
        self,
        parts: Parts,
        manifest: Manifest,
        placement: Placement,
        *,
        checks_identity: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._parts = parts
        self._manifest = manifest
        self._placement = placement
        self._checks_identity = checks_identity
        self._lock = threading.Lock()
        self._on_progress = on_progress
        self._missing = {index: manifest.storages[index].nbytes for index in placement.storages}
        self._total = sum(self._missing.values())
        self._done = 0

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def decode(self, group: FrameGroup, view: memoryview, worker: ChunkWorker) -> None:
        """Decode all frames of a group to where their bytes go."""
        for index, frame in split(group, view):
            read = group.reads[index]
            spec = self._manifest.chunks[read.chunk]
            expected = Expected(ChunkId(spec.chunk_id), spec.nbytes)
            try:
                worker.decode_to_targets(
                    frame,
                    expected,
                    read.targets,
                    self._destinations(read.targets),
                    checks_identity=self._checks_identity,
                )
            except (CorruptError, UnsupportedError) as error:
                raise located(error, self._parts, self._manifest, read) from error
            self._count(read.targets)
        self._tell()

    def _destinations(self, targets: Sequence[Target]) -> list[memoryview]:
        with self._lock:
            return [
                self._placement.destination(target.storage)[
                    target.storage_offset : target.storage_offset + target.nbytes
                ]
                for target in targets
            ]

    def _count(self, targets: Sequence[Target]) -> None:
        for target in targets:
            with self._lock:
                self._missing[target.storage] -= target.nbytes
                self._done += target.nbytes
                is_complete = self._missing[target.storage] == 0
            if is_complete:
                self._placement.placed(target.storage)


def located(error: CkstoreError, parts: Parts, manifest: Manifest, read: ChunkRead) -> CkstoreError:
    """Return the error with pack, offset and the tensor that suffers put into its message."""
    pack = manifest.packs[read.frame.pack].pack_id.hex()
    tensor = next(iter(tensor_paths(manifest, {read.chunk}, count_max=1)), "(none)")
    header = manifest.header
    return type(error)(
        error.what,
        where=f"pack {pack}, offset {read.frame.offset}, chunk {read.frame.chunk_id.hex()[:16]}, tensor {tensor}, "
        f"step {header.step} (seq {header.seq}) of run {header.run!r} in {parts.backend.root}",
        todo=error.todo or "restore an older checkpoint or another copy; `ckstore verify` lists all damage",
        **{
            **error.facts,
            "pack_id": pack,
            "offset": read.frame.offset,
            "chunk_id": read.frame.chunk_id.hex(),
            "tensor": tensor,
        },
    )
