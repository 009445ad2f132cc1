"""Jobs of many ranks in one process: each rank's work is done in turn, in the order of the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckstore.config import Policy
from ckstore.io.url import backend_for
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.work import RankContents, RankRequest, RankTools, RankWork, Root, decode_more, decode_receipt
from ckstore.results import Receipt
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record

FAST = Policy(compression="fast")


def open_repository(path: Path, run: str = "main") -> Repository:
    """Open an existing store as another process would."""
    backend = backend_for(path)
    return Repository(backend, read_store_record(backend), run)


@dataclass
class PlayedJob:
    """A job whose ranks take turns in this process.

    Args:
        path: The store; it exists.
        world: Number of ranks.
    """

    path: Path
    world: int
    on_divergence: str = "warn"
    number: int = 0
    tools: list[RankTools] = field(init=False)
    captures: list[RankCapture] = field(init=False)
    root: Root = field(init=False)
    asked_for_more: int = 0

    def __post_init__(self) -> None:
        self.tools = [RankTools(open_repository(self.path), rank) for rank in range(self.world)]
        self.captures = [RankCapture(self.world) for _ in range(self.world)]
        self.root = Root(self.tools[0].repository, RankContents(), on_divergence=self.on_divergence)

    def commit(self, states: Sequence[Any], step: int, policy: Policy = FAST) -> Receipt:
        """Commit the states of all ranks as one checkpoint."""
        self.number += 1
        repository = self.tools[0].repository
        repository.prepare_run()
        repository.lease.take()
        requests = [
            RankRequest(capture.capture(state), step, policy)
            for capture, state in zip(self.captures, states, strict=True)
        ]
        works = [
            RankWork(tools, request, self.number.to_bytes(16, "little"))
            for tools, request in zip(self.tools, requests, strict=True)
        ]
        contents = {digest: work.content(digest) for work in works for digest in work.digests}
        spans = self.root.plan([work.digests for work in works], contents)
        parts = {rank: work.write(each) for rank, (work, each) in enumerate(zip(works, spans, strict=True))}
        while more := self.root.merge(parts):
            self.asked_for_more += len(more)
            parts = {rank: works[rank].write_more(decode_more(content)) for rank, content in more.items()}
        receipt = decode_receipt(self.root.publish(requests[0], works[0].watch))
        for work in works:
            work.finish(receipt)
        return receipt

    def close(self) -> None:
        """Close the handles of all ranks."""
        for tools in self.tools:
            tools.repository.close()
