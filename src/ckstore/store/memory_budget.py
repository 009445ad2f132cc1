"""How much memory one thread of each operation may use, and how many threads and buffers fit into a policy's memory.

Every bound on the memory that ``Policy.memory_nbytes_max`` limits is here. A budget is at least what one thread of the
operation allocates: tests/integration/test_memory_bounds.py measures commits, restores and verify.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.config import KIB, MIB, Limits, Policy

READ_BUFFERS, READ_BUFFERS_MIN = 20, 4
"""Preferred number of read buffers, and the minimum that keeps a disk and one decoder busy."""

WRITE_BLOCK_NBYTES = 8 * MIB
"""Larger blocks were not faster; smaller ones cost more system calls."""

WRITE_BLOCKS, WRITE_BLOCKS_MIN = 12, 3
"""Eight that are being written and some that are being filled; more were not faster. The minimum: a frame may span two
blocks while a third one is written."""


def read_buffer_nbytes(limits: Limits) -> int:
    """Return the size of a read buffer, in bytes, that holds any frame."""
    # Beyond the chunk: frame header, codec tables, alignment at both ends.
    return limits.chunk_nbytes_max + 64 * KIB


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The most memory that one thread may use.

    Threads get memory before buffers, because a thread gains more than a buffer. At least one thread and the fewest
    buffers that work are used, even if these exceed the policy's memory.

    Args:
        chunks: Buffers, as a multiple of the longest chunk.
        mib: Memory that does not grow with the chunk, in MiB.
    """

    chunks: float
    mib: float

    def nbytes(self, limits: Limits) -> int:
        """Return the budget in bytes."""
        return int(self.chunks * limits.chunk_nbytes_max + self.mib * MIB)

    def fit_threads(self, policy: Policy, limits: Limits) -> int:
        """Return how many threads that need no buffers fit."""
        return max(1, min(policy.thread_count, policy.memory_nbytes_max // self.nbytes(limits)))

    def fit_writing(self, policy: Policy, limits: Limits, *, spare_threads: int = 0) -> tuple[int, int]:
        """Return how many threads and write blocks fit.

        Args:
            policy: Threads and memory.
            limits: Size limits of the store.
            spare_threads: Additional threads that mostly wait for the disk.
        """
        memory, worker = policy.memory_nbytes_max, self.nbytes(limits)
        wanted = policy.thread_count + spare_threads
        threads = max(1, min(wanted, (memory - WRITE_BLOCKS_MIN * WRITE_BLOCK_NBYTES) // worker))
        blocks = (memory - threads * worker) // WRITE_BLOCK_NBYTES
        return threads, max(WRITE_BLOCKS_MIN, min(WRITE_BLOCKS, blocks))

    def fit_reading(self, policy: Policy, limits: Limits, *, buffer_nbytes: int | None = None) -> tuple[int, int]:
        """Return how many threads and read buffers fit.

        Each thread needs one buffer in addition to those that are being filled; more threads would only wait.

        Args:
            policy: Threads and memory.
            limits: Size limits of the store.
            buffer_nbytes: Size of a buffer; None: that of ``read_buffer_nbytes``.
        """
        buffer = buffer_nbytes or read_buffer_nbytes(limits)
        memory, worker = policy.memory_nbytes_max, self.nbytes(limits) + buffer
        threads = max(1, min(policy.thread_count, (memory - READ_BUFFERS_MIN * buffer) // worker))
        filling = max(READ_BUFFERS_MIN, min(READ_BUFFERS, (memory - threads * worker) // buffer))
        return threads, min(max(READ_BUFFERS, threads + READ_BUFFERS_MIN), threads + filling)


CHECKSUM = MemoryBudget(0, 0)
"""Compare checksums of stored frames. A thread uses only its read buffer."""

DECODE = MemoryBudget(4, 1)
"""Decode frames: two buffers of planes, the output of zstd, the decoder's own chunk; contexts and tables of coders."""

DECODE_CHAIN = MemoryBudget(5, 1)
"""Decode frames with their bases: the decoder, and a base."""

REREAD = MemoryBudget(8, 2)
"""Read the chunks of a checkpoint in any order, or walk a tree of bases: the decoder, a read buffer, and three chunks,
which are bases or are held for the caller."""

MEASURE = MemoryBudget(9, 2)
"""Read chunks as ``REREAD``, and split them into planes."""

ENCODE = MemoryBudget(8.25, 8.5)
"""Code chunks: two buffers of planes, the coded planes, a result of zstd, and a bitmap; four chunks that are gathered,
read back or compared. The rest: contexts of zstd, samples, temporary blocks of numpy."""

ENCODE_DELTA = MemoryBudget(10.25, 8.75)
"""Code chunks against bases: also a base and a read buffer."""

QUANTIZE = MemoryBudget(21.25, 12.75)
"""Quantize chunks: also four chunks of a task, plain and as they will be decoded; the elements as fp32, which are up to
two chunks. Then either factors, classes and sums of rows and columns, or a low-rank product: five chunks and 4 MiB."""
