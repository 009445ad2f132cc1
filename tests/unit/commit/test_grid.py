"""Chunks of shards end on the grid of the whole tensor, so another layout has mostly the same chunks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckstore.commit.chunking import grid_nbytes, plan_commit
from ckstore.config import MIB, Limits
from ckstore.state.memory import SpanShape

LIMITS = Limits(chunk_nbytes_max=64 << 10)
SHAPE = SpanShape(8 * MIB, 4, True)


def edges(start: int, nbytes: int) -> set[tuple[int, int]]:
    """Return the ranges of the whole tensor that the chunks of one shard hold."""
    plan = plan_commit([SpanShape(nbytes, 4, True)], LIMITS, starts=[start])
    (storage,) = plan.storages
    assert sum(piece.nbytes for piece in storage.pieces) == nbytes
    positions = [plan.position_of(chunk.sources[0]) for chunk in plan.chunks]
    return {(position, position + chunk.nbytes) for position, chunk in zip(positions, plan.chunks, strict=True)}


@given(st.integers(0, 1 << 20), st.integers(1 << 17, 1 << 19))
def test_a_shard_is_cut_where_the_whole_tensor_is_cut(start: int, nbytes: int) -> None:
    start, nbytes = start - start % 4, nbytes - nbytes % 4
    step = grid_nbytes(SHAPE, LIMITS.chunk_nbytes_max)
    found = sorted(edges(start, nbytes))
    assert [lo for lo, _ in found][1:] == [hi for _, hi in found][:-1]
    assert all(hi % step == 0 for _, hi in found[:-1])
    assert all(hi - lo <= step for lo, hi in found)


def test_most_chunks_survive_another_number_of_ranks() -> None:
    def cut(ranks: int) -> set[tuple[int, int]]:
        rows = 2048
        bounds = [rows * rank // ranks * (SHAPE.nbytes // rows) for rank in range(ranks + 1)]
        return set().union(*(edges(lo, hi - lo) for lo, hi in pairwise(bounds)))

    eight, six = cut(8), cut(6)
    assert sum(hi - lo for lo, hi in eight & six) > 0.9 * SHAPE.nbytes


def test_chunks_end_where_those_of_the_base_begin() -> None:
    step = grid_nbytes(SHAPE, LIMITS.chunk_nbytes_max)
    nbytes = 3 * step
    # An edge within an element, at the begin and beyond the end are those of another tensor.
    wanted = {0: [0, 400_000 % step, step, 5 * step, 4002]}
    plan = plan_commit([SpanShape(nbytes, 4, True), SpanShape(nbytes, 4, True)], LIMITS, edges=wanted)
    cut, uncut = ([piece.nbytes for piece in storage.pieces] for storage in plan.storages)
    assert cut == [400_000 % step, step - 400_000 % step, step, step]
    assert uncut == [step] * 3
