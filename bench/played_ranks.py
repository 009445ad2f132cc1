"""The ranks of a job, played one after another by this process: their commits are real, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.rank_plans import rank_of
from ckstore.config import Policy
from ckstore.io.url import backend_for
from ckstore.ranks.arrays import RankState
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.part import Part
from ckstore.ranks.work import RankContents, RankRequest, RankTools, RankWork, Root, decode_receipt
from ckstore.results import Receipt
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

POLICY = Policy(compression="none")


class PlayedRanks:
    """Ranks that each hold rows of the same matrices, or any state.

    Args:
        path: The store; it exists.
        world: Number of ranks.

    Attributes:
        compared_nbytes: Bytes that all ranks hashed in the last commit only to compare them.
    """

    def __init__(self, path: Path, world: int) -> None:
        self._path, self._world = path, world
        self.compared_nbytes = 0

    def commit(self, arrays: dict[str, np.ndarray], step: int) -> Receipt:
        """Commit these matrices as one checkpoint: each rank has some of the rows."""
        return self._commit([self._captured(rank, arrays) for rank in range(self._world)], step)

    def commit_states(self, states: Sequence[Any], step: int) -> Receipt:
        """Commit the states of all ranks as one checkpoint."""
        return self._commit([RankCapture(self._world).capture(state) for state in states], step)

    def _commit(self, captured: Sequence[RankState], step: int) -> Receipt:
        repositories = [self._opened() for _ in range(self._world)]
        try:
            repositories[0].prepare_run()
            repositories[0].lease.take()
            return self._commit_by(repositories, captured, step)
        finally:
            for repository in repositories:
                repository.close()

    def _commit_by(self, repositories: list[Repository], captured: Sequence[RankState], step: int) -> Receipt:
        root = Root(repositories[0], RankContents())
        requests = [RankRequest(state, step, POLICY) for state in captured]
        works = [
            RankWork(RankTools(repository, rank), request, step.to_bytes(16, "little"))
            for rank, (repository, request) in enumerate(zip(repositories, requests, strict=True))
        ]
        contents = {digest: work.content(digest) for work in works for digest in work.digests}
        spans = root.plan([work.digests for work in works], contents)
        parts = {rank: work.write(each) for rank, (work, each) in enumerate(zip(works, spans, strict=True))}
        more = root.merge(parts)
        assert not more, "replicas differ"
        self.compared_nbytes = sum(
            int(Part.decode(part).checks["nbytes"].sum()) - _owned_nbytes(state, work)
            for state, work, part in zip(captured, works, parts.values(), strict=True)
        )
        receipt = decode_receipt(root.publish(requests[0], works[0].watch))
        for work in works:
            work.finish(receipt)
        return receipt

    def _captured(self, rank: int, arrays: dict[str, np.ndarray]) -> RankState:
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


def _owned_nbytes(state: RankState, work: RankWork) -> int:
    """Return the bytes of replicas that a rank wrote, and hashed for that."""
    alone = sum(held.nbytes for held in state.held if len(held.holders) == 1)
    return (work.share_nbytes or 0) - alone


def _rows_of(rank: int, world: int, rows: int) -> tuple[int, int]:
    """Return where the rows of a rank begin, and how many there are."""
    size, begin = Shard.local_shard_size_and_offset(rows, world, rank)
    return int(begin), int(size)
