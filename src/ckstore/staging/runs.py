"""What a device is told to copy, and in which order.

A device sends a small tensor in less time than it takes to tell it of the next one, and would have nothing to do: so
some large storages, which lie last, come first, and small ones are told of while those are on their way. No more of
them than that takes: a saver begins with what lies first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ckstore.config import MIB
from ckstore.plan import SHARED_NBYTES_MAX
from ckstore.saver.arena import UNIT_NBYTES

if TYPE_CHECKING:
    from ckstore.staging.stowage import Section

RUN_NBYTES_MAX = 64 * MIB
"""Bytes of one copy: launching one takes some microseconds, and its end is when its units are marked."""

LEAD_NBYTES = 256 * MIB
"""Of large storages, before small ones: 5 ms of the copy of ``stall_gpu_blocking``, in which a thread tells of some
hundred."""

_NONE = range(0)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of one storage that go to one place in the slot.

    ``units`` of the section are complete when these have come, and all that were told of before.
    """

    storage: int
    offset: int
    place: int
    nbytes: int
    units: range


def runs_of(section: Section) -> tuple[Run, ...]:
    """Return the copies of a section, in the order in which a device is to be told of them."""
    joined = list(_joined(section))
    # Small storages lie first.
    cut = next((number for number, (run, _) in enumerate(joined) if run.nbytes >= SHARED_NBYTES_MAX), 0)
    if cut == 0:
        return tuple(_with_units(joined, 0))
    so_far = accumulate((run.nbytes for run, _ in joined[cut:]), initial=0)
    end = cut + sum(1 for nbytes in takewhile(lambda nbytes: nbytes < LEAD_NBYTES, so_far))
    lead = joined[cut:end]
    shared = (joined[cut][0].place - section.begin) // UNIT_NBYTES
    # The unit in which the first large one begins may hold small ones too: it is complete when all have come.
    last, _ = joined[cut - 1]
    small = [*joined[: cut - 1], (last, shared + 1)]
    led = max(shared + 1, lead[-1][1])
    return (*_with_units(lead, shared + 1), *_with_units(small, 0), *_with_units(joined[end:], led))


def columns_of(runs: Sequence[Run]) -> NDArray[np.int64]:
    """Return storages, offsets, places and lengths of copies."""
    rows = [(run.storage, run.offset, run.place, run.nbytes) for run in runs]
    columns: NDArray[np.int64] = np.array(rows, np.int64).reshape(-1, 4).T
    return columns


def _joined(section: Section) -> Iterator[tuple[Run, int]]:
    """Join rows that follow each other in a storage; yield with each the end of the units that lie in runs up to it."""
    run: Run | None = None
    for unit in range(section.unit_count):
        for storage, offset, place, nbytes in section.rows_of(unit):
            if run is not None:
                follows = (run.storage, run.offset + run.nbytes, run.place + run.nbytes) == (storage, offset, place)
                if follows and run.nbytes + nbytes <= RUN_NBYTES_MAX:
                    run = replace(run, nbytes=run.nbytes + nbytes)
                    continue
                yield run, unit
            run = Run(storage, offset, place, nbytes, _NONE)
    if run is not None:
        yield run, section.unit_count


def _with_units(runs: Iterable[tuple[Run, int]], begin: int) -> Iterator[Run]:
    """Say of each run which units it completes, from ``begin`` on."""
    for run, end in runs:
        yield replace(run, units=range(begin, max(begin, end)))
        begin = max(begin, end)
