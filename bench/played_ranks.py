"""The ranks of an FSDP job, played one after another by this process: their commits are real, and nothing is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.rank_plans import rank_of
from ckstore.config import Policy
from ckstore.io.url import backend_for
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.work import RankContents, RankRequest, RankTools, RankWork, Root, decode_receipt
from ckstore.results import Receipt
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

POLICY = Policy(compression="none")


class PlayedRanks:
    """Ranks that each hold rows of the same matrices.

    Args:
        path: The store; it exists.
        world: Number of ranks.
    """

    def __init__(self, path: Path, world: int) -> None:
        self._path, self._world = path, world

    def commit(self, arrays: dict[str, np.ndarray], step: int) -> Receipt:
        """Commit these matrices as one checkpoint."""
        repositories = [self._opened() for _ in range(self._world)]
        try:
            repositories[0].prepare_run()
            repositories[0].lease.take()
            return self._commit(arrays, step, repositories)
        finally:
            for repository in repositories:
                repository.close()

    def _commit(self, arrays: dict[str, np.ndarray], step: int, repositories: list[Repository]) -> Receipt:
        root = Root(repositories[0], RankContents())
        requests = [RankRequest(self._captured(rank, arrays), step, POLICY) for rank in range(self._world)]
        works = [
            RankWork(RankTools(repository, rank), request, step.to_bytes(16, "little"))
            for rank, (repository, request) in enumerate(zip(repositories, requests, strict=True))
        ]
        contents = {digest: work.content(digest) for work in works for digest in work.digests}
        spans = root.plan([work.digests for work in works], contents)
        parts = {rank: work.write(each) for rank, (work, each) in enumerate(zip(works, spans, strict=True))}
        more = root.merge(parts)
        assert not more, "there are no replicas"
        receipt = decode_receipt(root.publish(requests[0], works[0].watch))
        for work in works:
            work.finish(receipt)
        return receipt

    def _captured(self, rank: int, arrays: dict[str, np.ndarray]) -> Any:
        with rank_of(rank, self._world):
            mesh = init_device_mesh("cpu", (self._world,), mesh_dim_names=(f"rank{rank}",))
            state = {}
            for name, array in arrays.items():
                begin, count = _rows_of(rank, self._world, len(array))
                local = torch.from_numpy(array[begin : begin + count]).clone()
                options: dict[str, Any] = {"shape": torch.Size(array.shape), "stride": (array.shape[1], 1)}
                state[name] = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, **options)
            return RankCapture(self._world).capture(state)

    def _opened(self) -> Repository:
        backend = backend_for(self._path)
        return Repository(backend, read_store_record(backend), "main")


def _rows_of(rank: int, world: int, rows: int) -> tuple[int, int]:
    """Return where the rows of a rank begin, and how many there are."""
    size, begin = Shard.local_shard_size_and_offset(rows, world, rank)
    return int(begin), int(size)
