"""Find tensors that are the rounding of another tensor of the same state: weights beside their fp32 masters.

A few elements tell who may be whose master; whether every bit agrees is found out chunk by chunk when they are
coded, so a wrong guess costs time and never bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.codec import kernels
from ckstore.commit.chunking import CommitPlan
from ckstore.commit.pipeline import ByteSource

_MARK_COUNT = 64
"""Elements that are compared to find a pair."""

_MARK_PLACES = (0.13, 0.5, 0.71)
"""Where they are: rows that were never touched look alike in many tensors."""

_KINDS = (1, 2)
"""bf16 and fp16, as kernels call them."""


def masters_of(plan: CommitPlan, storages: Sequence[ByteSource]) -> dict[int, int]:
    """Return, for chunks that may be roundings, the chunk that may be the master (indices of the plan)."""
    rounded = [index for index, spec in enumerate(plan.storages) if spec.is_float and spec.element_width == 2]
    sizes = {2 * plan.storages[index].nbytes for index in rounded}
    whole = _chunks_of_large_storages(plan)
    by_mark: dict[tuple[int, bytes], int] = {}
    for index, spec in enumerate(plan.storages):
        if spec.is_float and spec.element_width == 4 and spec.nbytes in sizes and index in whole:
            for mark in _rounded_marks(storages[index], spec.nbytes // 4):
                by_mark.setdefault((spec.nbytes // 4, mark), index)
    found: dict[int, int] = {}
    for index in rounded:
        count = plan.storages[index].nbytes // 2
        master = by_mark.get((count, _mark(storages[index], count, 2))) if index in whole else None
        if master is not None and len(whole[index]) == len(whole[master]):
            found.update(zip(whole[index], whole[master], strict=True))
    return {
        chunk: master for chunk, master in found.items() if plan.chunks[master].nbytes == 2 * plan.chunks[chunk].nbytes
    }


def _chunks_of_large_storages(plan: CommitPlan) -> dict[int, list[int]]:
    """Return the chunks of each storage that has chunks of its own."""
    found: dict[int, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        if len(chunk.sources) == 1:
            found.setdefault(chunk.sources[0].storage, []).append(index)
    return found


def _mark(storage: ByteSource, count: int, width: int) -> bytes:
    """Return some elements from the places of ``_MARK_PLACES``."""
    found = []
    for place in _MARK_PLACES:
        start = max(0, int(count * place) - _MARK_COUNT // 2)
        found.append(bytes(storage.read(start * width, min(count, start + _MARK_COUNT) * width)))
    return b"".join(found)


def _rounded_marks(storage: ByteSource, count: int) -> list[bytes]:
    mark = _mark(storage, count, 4)
    marks = []
    for kind in _KINDS:
        rounded = bytearray(len(mark) // 2)
        kernels.round_floats(memoryview(mark), memoryview(rounded), kind)
        # A constant tells nobody from anybody else.
        if bytes(rounded) != bytes(rounded[:2]) * (len(rounded) // 2):
            marks.append(bytes(rounded))
    return marks
