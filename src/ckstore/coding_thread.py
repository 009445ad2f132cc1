"""What one thread of a commit has of its own: memory to code in, and a reader of bases."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.chain_reader import ChainReader, chain_reader_nbytes
from ckstore.config import Limits
from ckstore.decoder import FrameDecoder
from ckstore.pipeline import ChunkWorker, worker_nbytes
from ckstore.store.parts import Parts


@dataclass(frozen=True, slots=True)
class CodingThread:
    """What one thread has of its own."""

    worker: ChunkWorker
    reader: ChainReader

    @classmethod
    def of(cls, parts: Parts) -> CodingThread:
        """Make it; memory is taken when it is first needed."""
        worker = ChunkWorker(parts.limits.chunk_nbytes_max)
        # Bases are read before their chunk is coded, so that both can use the same scratch.
        decoder = FrameDecoder(parts.limits.chunk_nbytes_max, worker.scratch)
        return cls(worker, ChainReader(parts, decoder))


def thread_nbytes(limits: Limits, *, has_bases: bool) -> int:
    """Return the memory that one thread of a commit may use, in bytes."""
    return worker_nbytes(limits.chunk_nbytes_max) + (chain_reader_nbytes(limits) if has_bases else 0)
