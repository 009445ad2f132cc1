"""Join near ranges of a file, split far ones: few large reads instead of many small ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a file that someone wants; ``tag`` tells them apart."""

    offset: int
    nbytes: int
    tag: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes to read at once, and the ranges that lie wholly in them."""

    offset: int
    nbytes: int
    members: tuple[Range, ...]


def coalesce(ranges: Iterable[Range], *, gap_nbytes_max: int, span_nbytes_max: int) -> list[Span]:
    """Join ranges that lie near each other.

    Args:
        ranges: In any order; they may overlap.
        gap_nbytes_max: Read this many unwanted bytes between two ranges rather than read twice.
        span_nbytes_max: Join no further than this; one longer range still is a span of its own.

    Returns:
        Spans in the order of the file; each range is a member of exactly one.
    """
    spans: list[Span] = []
    members: list[Range] = []
    start = stop = 0
    for wanted in sorted(ranges, key=lambda each: (each.offset, each.nbytes)):
        end = wanted.offset + wanted.nbytes
        is_near = wanted.offset - stop <= gap_nbytes_max and max(stop, end) - start <= span_nbytes_max
        if members and not is_near:
            spans.append(Span(start, stop - start, tuple(members)))
            members = []
        if not members:
            start = stop = wanted.offset
        members.append(wanted)
        stop = max(stop, end)
    if members:
        spans.append(Span(start, stop - start, tuple(members)))
    return spans
