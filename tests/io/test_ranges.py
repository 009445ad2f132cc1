"""Protects the joining of reads: every range is covered by exactly one span, and spans keep their bounds."""

from hypothesis import given
from hypothesis import strategies as st

from ckstore.io.ranges import Range, coalesce

RANGES = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 600)), max_size=40)


@given(RANGES, st.integers(0, 500), st.integers(1, 3000))
def test_every_range_lies_in_exactly_one_span(pairs, gap, limit):
    ranges = [Range(offset, nbytes, tag) for tag, (offset, nbytes) in enumerate(pairs)]
    spans = coalesce(ranges, gap_nbytes_max=gap, span_nbytes_max=limit)
    assert sorted(member.tag for span in spans for member in span.members) == list(range(len(pairs)))
    for span in spans:
        assert span.nbytes <= max(limit, *(member.nbytes for member in span.members))
        for member in span.members:
            assert span.offset <= member.offset
            assert member.offset + member.nbytes <= span.offset + span.nbytes
    assert [span.offset for span in spans] == sorted(span.offset for span in spans)


def test_near_ranges_are_joined_and_far_ones_are_not():
    ranges = [Range(100, 10, 0), Range(0, 90, 1), Range(400, 10, 2)]
    spans = coalesce(ranges, gap_nbytes_max=10, span_nbytes_max=1000)
    assert [(span.offset, span.nbytes) for span in spans] == [(0, 110), (400, 10)]


def test_span_does_not_grow_past_its_limit():
    spans = coalesce([Range(i * 10, 10, i) for i in range(10)], gap_nbytes_max=0, span_nbytes_max=40)
    assert [span.nbytes for span in spans] == [40, 40, 20]


def test_unwanted_bytes_in_a_span_are_bounded_by_the_gap():
    spans = coalesce([Range(0, 10, 0), Range(21, 10, 1)], gap_nbytes_max=10, span_nbytes_max=1000)
    assert len(spans) == 2
