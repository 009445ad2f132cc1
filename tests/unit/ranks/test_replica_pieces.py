"""All ranks that hold a range compare it by the same pieces, whichever of them writes which part of it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.commit.chunking import grid_nbytes, plan_commit
from ckstore.config import KIB, MIB, Limits
from ckstore.format.tree import ListNode
from ckstore.hashing import chunk_id_of
from ckstore.ranks.arrays import Held, RankState, Unit
from ckstore.ranks.spans import Span, plan_spans
from ckstore.ranks.writing import Share, checks_of_owned, checks_of_rest
from ckstore.state.capture import Captured

WORLD = 3
HOLDERS = tuple(range(WORLD))


@dataclass
class Stored:
    """A local storage."""

    content: bytes
    element_width: int
    is_float: bool = True
    is_host: bool = True

    @property
    def nbytes(self):
        return len(self.content)

    def read(self, lo, hi):
        return memoryview(self.content)[lo:hi]


def state_of(ranges):
    """Make the state of a rank that holds these ranges: (offset, nbytes, element width), each of its own unit."""
    rng = np.random.default_rng(7)
    storages = [Stored(rng.bytes(nbytes), width) for _, nbytes, width in ranges]
    return RankState(
        captured=Captured(ListNode(()), [], [], storages, []),
        tensors=(),
        units=tuple(
            Unit((f"u{at}",), offset + nbytes, width, True) for at, (offset, nbytes, width) in enumerate(ranges)
        ),
        held=tuple(Held(at, offset, nbytes, at, 0, HOLDERS) for at, (offset, nbytes, _) in enumerate(ranges)),
    )


def checks_of_all(ranges, limits, *, are_unshared=False):
    """Return the checks of each rank, after all of them have written their spans."""
    state = state_of(ranges)
    steps = [grid_nbytes(storage, limits.chunk_nbytes_max) for storage in state.captured.storages]
    group = [Span(held.unit, held.offset, held.offset + held.nbytes) for held in state.held]
    checks = []
    for spans in plan_spans({HOLDERS: group}, steps, [0] * WORLD):
        share = Share.of(state, {unit: [(lo, hi) for at, lo, hi in spans if at == unit] for unit, *_ in group})
        captured = share.captured(state)
        unshared = frozenset(range(len(share.owned))) if are_unshared else frozenset()
        plan = plan_commit(captured.storages, limits, unshared=unshared, starts=captured.starts)
        contents = [
            b"".join(captured.storages[at].read(lo, lo + size) for at, lo, size in _sources(chunk))
            for chunk in plan.chunks
        ]
        stored = SimpleNamespace(
            frames=[SimpleNamespace(frame=SimpleNamespace(chunk_id=chunk_id_of(each))) for each in contents]
        )
        found = [*checks_of_owned(state, share, plan, stored, limits), *checks_of_rest(state, share.rest, limits)]
        checks.append(sorted(found))
    return checks


def _sources(chunk):
    return [(source.storage, source.offset, source.nbytes) for source in chunk.sources]


def check_same(ranges, limits, **options):
    """All ranks have the same checks, and these cover each range once."""
    first, *others = checks_of_all(ranges, limits, **options)
    assert all(other == first for other in others)
    for unit, (offset, nbytes, _) in enumerate(ranges):
        place = offset
        for check in (check for check in first if check.unit == unit):
            assert check.offset == place
            place += check.nbytes
        assert place == offset + nbytes


@st.composite
def ranges_near(draw, nbytes_max):
    """Draw ranges near multiples of half this length, of about the lengths up to which ranges share chunks."""
    ranges = []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.sampled_from([2, 4]))
        offset = draw(st.integers(0, 2)) * nbytes_max // 2 + draw(st.integers(-16, 16)) * 16 * KIB
        nbytes = draw(st.sampled_from([16, 100, 128, 200, 255, 256, 300])) * KIB + draw(st.integers(-2, 2)) * 4
        ranges.append((max(0, offset), nbytes, width))
    return ranges


@given(ranges_near(4 * MIB), st.booleans())
def test_replicas_are_compared_by_the_same_pieces(ranges, are_unshared):
    check_same(ranges, Limits(), are_unshared=are_unshared)


@given(ranges_near(64 * KIB), st.sampled_from([16, 64, 256]), st.booleans())
def test_replicas_are_compared_by_the_same_pieces_with_small_chunks(ranges, kib, are_unshared):
    check_same(ranges, Limits(chunk_nbytes_max=kib * KIB), are_unshared=are_unshared)


@pytest.mark.parametrize("width", [2, 4])
def test_small_shard_across_a_grid_line(width):
    # 16 ranks share a tensor of 16-bit elements: one shard has chunks of its own, and crosses a multiple of 2 MiB.
    check_same([(2 * MIB - 100 * KIB, 200 * KIB, width)], Limits())


def test_large_range_is_divided_among_ranks():
    checks = checks_of_all([(3 * MIB, 20 * MIB, 4)], Limits())
    assert checks[0] == checks[1] == checks[2]
    assert [(check.offset, check.nbytes) for check in checks[0]] == [
        (3 * MIB, MIB),
        *((at * MIB, 4 * MIB) for at in (4, 8, 12, 16)),
        (20 * MIB, 3 * MIB),
    ]


def test_a_flipped_bit_changes_one_check():
    state = state_of([(0, 9 * MIB, 4)])
    content = bytearray(state.captured.storages[0].content)
    content[5 * MIB] ^= 1
    before = list(checks_of_rest(state, state.held, Limits()))
    state.captured.storages[0].content = bytes(content)
    after = list(checks_of_rest(state, state.held, Limits()))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
