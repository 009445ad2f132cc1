"""Plan the place of each byte of a state in a slot, and the order of copying.

``plan_layout`` places all bytes; nothing is copied here. Unguarded memory comes before guarded memory, and host memory
before devices. Within each section, what the saver needs first comes first: samples of chunks, small storages, then the
others in the order of the plan.

``runs_of`` orders the copies of a device section. ``spots_of`` selects the words of guarded memory that are compared to
detect changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, takewhile

import numpy as np
from numpy.typing import NDArray

from ckstore.background.arena import UNIT_NBYTES
from ckstore.background.staged_head import SampleRow
from ckstore.codec.kernels.bytes_reference import RUN_COUNT, SAMPLE_NBYTES, run_of
from ckstore.commit.chunking import SHARED_NBYTES_MAX, StorageShape
from ckstore.config import MIB
from ckstore.format.tensors import byte_strides_of
from ckstore.state.capture import Captured

RUN_NBYTES_MAX = 64 * MIB
"""Limit for one device copy. Launching one takes microseconds, and its units are marked when it ends."""

LEAD_NBYTES = 256 * MIB
"""Bytes of large storages that are copied before small ones. That takes about 5 ms: enough to launch hundreds of small
copies."""

_NONE = range(0)

NOW, LAZY, DEVICE_NOW, DEVICE_LAZY = range(4)
"""When a storage is copied: before training continues, or behind a guard; each from host memory or from a device."""

_PAGE_NBYTES, _LINE_NBYTES = 4096, 64

_PAGED_NBYTES_MIN = 64 << 10

_EXCERPT_NBYTES = 4096
"""Bytes of the middle of a storage, from which a commit recognizes roundings of other storages."""

_STORAGE, _OFFSET, _PLACE, _NBYTES = range(4)

_COLUMNS = 4

WORD_NBYTES = 8

SPOTS_MAX = 1 << 15
"""Limit for all guarded memory. Reading an uncached word takes up to 50 ns, and ``commit_async`` waits for that."""

_PITCH_NBYTES = 4096
"""Distance of compared words in storages without rows."""

_PITCH_NBYTES_MIN = 64

_SPREAD = 40503
"""Selects another column in each row. Odd, from Knuth's multiplicative hashing with 16 bits."""


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous device copy: bytes of one storage that go to one place in the slot.

    ``units`` of the section are complete when this run and all earlier ones have arrived.
    """

    storage: int
    offset: int
    place: int
    nbytes: int
    units: range


def runs_of(section: Section) -> tuple[Run, ...]:
    """Return the copies of a section in launch order.

    Copying a small tensor takes less time than launching its copy, so the device would be idle. Therefore some large
    storages are launched first, although they are last in the slot, and small ones are launched during their copy.
    The others follow, because the saver begins with the small ones.
    """
    joined = list(_joined(section))
    # Small storages are placed first.
    cut = next((number for number, (run, _) in enumerate(joined) if run.nbytes >= SHARED_NBYTES_MAX), 0)
    if cut == 0:
        return tuple(_with_units(joined, 0))
    so_far = accumulate((run.nbytes for run, _ in joined[cut:]), initial=0)
    end = cut + sum(1 for nbytes in takewhile(lambda nbytes: nbytes < LEAD_NBYTES, so_far))
    lead = joined[cut:end]
    shared = (joined[cut][0].place - section.begin) // UNIT_NBYTES
    # The unit where the first large storage begins may contain small ones, too. It is complete after those.
    last, _ = joined[cut - 1]
    small = [*joined[: cut - 1], (last, shared + 1)]
    led = max(shared + 1, lead[-1][1])
    return (*_with_units(lead, shared + 1), *_with_units(small, 0), *_with_units(joined[end:], led))


def columns_of(runs: Sequence[Run]) -> NDArray[np.int64]:
    """Return storages, offsets, places and lengths of runs, as four rows."""
    rows = [(run.storage, run.offset, run.place, run.nbytes) for run in runs]
    columns: NDArray[np.int64] = np.array(rows, np.int64).reshape(-1, 4).T
    return columns


def _joined(section: Section) -> Iterator[tuple[Run, int]]:
    """Join adjacent rows into runs. Yield each with the number of units that are complete after it."""
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
    """Assign to each run the units that it completes, from ``begin`` on."""
    for run, end in runs:
        yield replace(run, units=range(begin, max(begin, end)))
        begin = max(begin, end)


Row = tuple[int, int, int, int]
Sampled = tuple[int, int, int, int]
"""A chunk: storage, offset, length and element width."""


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Units of a slot that are copied together.

    Args:
        begin: Offset of the first unit in the slot.
        firsts: For each unit the index of its first row; then the number of rows.
        rows: Storage, offset in it, place in the slot, and length. No row crosses a unit boundary.
        sample_row_count: How many of the first rows are samples of chunks. Stored bytes are never read from samples.
        runs: The copies in launch order. Only for sections on devices.
    """

    begin: int
    firsts: NDArray[np.uint64]
    rows: NDArray[np.int64]
    sample_row_count: int = 0
    runs: tuple[Run, ...] = ()
    words: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, _COLUMNS), np.int64))
    """Some words of guarded memory, in columns like ``rows``. They are compared to detect changes."""
    storages: tuple[int, ...] = field(init=False)
    """The storages in this section, ascending."""
    run_columns: NDArray[np.int64] = field(init=False)
    """Storages, offsets, places and lengths of the runs, as four rows."""

    def __post_init__(self) -> None:
        # Computed once, because many commits use the same layout.
        object.__setattr__(self, "storages", tuple(np.unique(self.rows[:, _STORAGE]).tolist()))
        object.__setattr__(self, "run_columns", columns_of(self.runs))

    @property
    def unit_count(self) -> int:
        """Number of units."""
        return self.firsts.size - 1

    @property
    def first_unit(self) -> int:
        """Index of its first unit in the slot."""
        return self.begin // UNIT_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes to copy, including samples."""
        return int(self.rows[:, _NBYTES].sum())

    def table(self, starts: NDArray[np.uint64], address: int) -> NDArray[np.uint64]:
        """Return source, destination and length of each row, for ``kernels.copy_units``.

        Args:
            starts: The address of each storage.
            address: The address of the slot.
        """
        return _table_of(self.rows, starts, address)

    def table_of_words(self, starts: NDArray[np.uint64], address: int) -> NDArray[np.uint64]:
        """Return the same for ``words``."""
        return _table_of(self.words, starts, address)

    def rows_of(self, unit: int) -> Iterator[Row]:
        """Yield the rows of a unit."""
        for row in range(int(self.firsts[unit]), int(self.firsts[unit + 1])):
            storage, offset, place, nbytes = (int(word) for word in self.rows[row])
            yield storage, offset, place, nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLayout:
    """Where each byte of a state is in a slot.

    Args:
        places: Offset of each storage in the slot.
        samples: Bytes that are staged separately from their storage, and before it.
        sections: One for each of ``NOW``, ``LAZY``, ``DEVICE_NOW``, ``DEVICE_LAZY``.
        end: Where the storages end and the head may begin.
    """

    places: tuple[int, ...]
    samples: tuple[SampleRow, ...]
    sections: tuple[Section, ...]
    end: int


def plan_layout(
    storages: Sequence[StorageShape], kinds: Sequence[int], sampled: Iterable[Sampled], pitches: Sequence[int] = ()
) -> ArenaLayout:
    """Plan the layout of a state.

    Args:
        storages: The storages to stage.
        kinds: When each is copied: ``NOW`` and so on.
        sampled: The chunks that a commit samples before it encodes.
        pitches: Row length of each storage in bytes, to compare one word of each row. Empty: no rows are compared.
    """
    builder = _LayoutBuilder(storages, kinds)
    samples_by_kind: dict[int, list[Sampled]] = {NOW: [], LAZY: []}
    for each in sampled:
        if each[2] > SAMPLE_NBYTES and kinds[each[0]] in samples_by_kind:
            samples_by_kind[kinds[each[0]]].append(each)
    excerpts = _possible_masters(storages)
    sections = []
    for kind in (NOW, LAZY, DEVICE_NOW, DEVICE_LAZY):
        builder.begin()
        for each in samples_by_kind.get(kind, ()):
            builder.add_sample(*each)
        builder.end_samples()
        indices = [index for index, its in enumerate(kinds) if its == kind]
        if kind in samples_by_kind:
            for index in indices:
                if index in excerpts:
                    builder.add_excerpt(index)
        for index in sorted(indices, key=lambda index: storages[index].nbytes >= SHARED_NBYTES_MAX):
            builder.add_storage(index)
        section = builder.section()
        is_on_device = kind in (DEVICE_NOW, DEVICE_LAZY)
        sections.append(replace(section, runs=runs_of(section)) if is_on_device else section)
    places = tuple(builder.places[index] for index in range(len(storages)))
    lazy = [index for index, its in enumerate(kinds) if its == LAZY]
    spots = spots_of({index: (storages[index].nbytes, pitches[index]) for index in lazy if index < len(pitches)})
    sections[LAZY] = replace(sections[LAZY], words=_words_of(sections[LAZY], spots, places))
    return ArenaLayout(places, tuple(builder.samples), tuple(sections), builder.end)


def _words_of(section: Section, spots: NDArray[np.int64], places: Sequence[int]) -> NDArray[np.int64]:
    """Return the words to compare: the first and last word of each row of the table, and those at the given spots.

    Samples of chunks are excluded: stored bytes are never read from them, and they have ten times as many rows.
    """
    firsts = section.rows[section.sample_row_count :].copy()
    lengths = np.minimum(firsts[:, _NBYTES], WORD_NBYTES)
    lasts = firsts.copy()
    lasts[:, (_OFFSET, _PLACE)] += (firsts[:, _NBYTES] - lengths)[:, None]
    firsts[:, _NBYTES] = lasts[:, _NBYTES] = lengths
    single = np.empty((len(spots), _COLUMNS), np.int64)
    single[:, (_STORAGE, _OFFSET)] = spots
    single[:, _PLACE] = np.array(places, np.int64)[spots[:, 0]] + spots[:, 1]
    single[:, _NBYTES] = WORD_NBYTES
    return np.concatenate((firsts, lasts, single))


def _table_of(rows: NDArray[np.int64], starts: NDArray[np.uint64], address: int) -> NDArray[np.uint64]:
    table = np.empty((len(rows), 3), np.uint64)
    words = rows.view(np.uint64)
    np.add(starts[rows[:, _STORAGE]], words[:, _OFFSET], out=table[:, 0])
    np.add(words[:, _PLACE], np.uint64(address), out=table[:, 1])
    table[:, 2] = words[:, _NBYTES]
    return table


class _LayoutBuilder:
    """Places storages and samples one after the other."""

    def __init__(self, storages: Sequence[StorageShape], kinds: Sequence[int]) -> None:
        self._storages = storages
        self.places: dict[int, int] = {}
        self.samples: list[SampleRow] = []
        self.end = 0
        self._begin = 0
        self._rows: list[Row] = []
        self._sample_row_count = 0

    def begin(self) -> None:
        """Begin a section."""
        self.end = self._begin = _aligned(self.end, UNIT_NBYTES)
        self._rows = []

    def end_samples(self) -> None:
        """Record that all samples of the section's chunks are placed."""
        self._sample_row_count = len(self._rows)

    def section(self) -> Section:
        """End the section and return it."""
        rows = np.array(self._rows, np.int64).reshape(-1, _COLUMNS)
        self.end = _aligned(self.end, UNIT_NBYTES)
        units = np.arange(self._begin // UNIT_NBYTES, self.end // UNIT_NBYTES + 1)
        firsts = np.searchsorted(rows[:, _PLACE] // UNIT_NBYTES, units).astype(np.uint64)
        return Section(self._begin, firsts, rows, self._sample_row_count)

    def add_storage(self, index: int) -> None:
        """Place a storage."""
        nbytes = self._storages[index].nbytes
        self.places[index] = self._room(nbytes)
        self._copy(index, 0, self.places[index], nbytes)

    def add_sample(self, index: int, offset: int, nbytes: int, width: int) -> None:
        """Place the sample of a chunk: the same bytes that a commit would sample."""
        place = at = self._room(SAMPLE_NBYTES)
        # A chunk with an incomplete element is sampled by bytes.
        for start, length in _sample_runs(nbytes, 1 if nbytes % width else width):
            self._copy(index, offset + start, at, length)
            at += length
        self.end = max(self.end, at)
        self.samples.append(SampleRow(index, offset, nbytes, width, place, at - place))

    def add_excerpt(self, index: int) -> None:
        """Place a copy of the middle of a storage."""
        whole = self._storages[index].nbytes
        nbytes = min(whole, _EXCERPT_NBYTES)
        offset = (whole - nbytes) // 2
        place = self._room(nbytes)
        self._copy(index, offset, place, nbytes)
        self.samples.append(SampleRow(index, offset, nbytes, 0, place, nbytes))

    def _room(self, nbytes: int) -> int:
        place = _aligned(self.end, _PAGE_NBYTES if nbytes >= _PAGED_NBYTES_MIN else _LINE_NBYTES)
        self.end = place + nbytes
        return place

    def _copy(self, index: int, offset: int, place: int, nbytes: int) -> None:
        while nbytes:
            step = min(nbytes, UNIT_NBYTES - place % UNIT_NBYTES)
            self._rows.append((index, offset, place, step))
            offset, place, nbytes = offset + step, place + step, nbytes - step


@lru_cache(maxsize=64)
def _sample_runs(nbytes: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return offset and length of each run of a chunk's sample."""
    runs = (run_of(index, nbytes // width, width) for index in range(RUN_COUNT))
    return tuple((start * width, count * width) for start, count in runs)


def _possible_masters(storages: Sequence[StorageShape]) -> set[int]:
    """Return the storages whose middle a commit will read: pairs of a 4-byte and a 2-byte float storage of one size."""
    floats = [index for index, each in enumerate(storages) if each.is_float and each.nbytes]
    halves = {index: 2 * storages[index].nbytes for index in floats if storages[index].element_width == 2}
    wanted = set(halves.values())
    wholes = {
        index: storages[index].nbytes
        for index in floats
        if storages[index].element_width == 4 and storages[index].nbytes in wanted
    }
    found = set(wholes.values())
    return {*wholes, *(index for index, nbytes in halves.items() if nbytes in found)} if found else set()


def _aligned(place: int, to: int) -> int:
    return -(-place // to) * to


def pitches_of(captured: Captured) -> list[int]:
    """Return the row length of each storage in bytes: the largest stride of its tensors with two or more dimensions."""
    pitches: list[int] = [0] * len(captured.storages)
    for spec in captured.tensors:
        if len(spec.shape) >= 2:
            width = captured.storages[spec.storage].element_width
            pitch = max(byte_strides_of(spec.library, spec.strides, width))
            if pitch > 0:
                pitches[spec.storage] = min(pitch, pitches[spec.storage] or pitch)
    return [max(pitch, _PITCH_NBYTES_MIN) if pitch else _PITCH_NBYTES for pitch in pitches]


def spots_of(rows: Mapping[int, tuple[int, int]]) -> NDArray[np.int64]:
    """Return storage and offset of the words of guarded memory that are compared to detect changes.

    Changes through ``.data`` do not increase version counters. Codebooks restart entries that way, one row at a time.
    So one word of each row is compared, each in another column, which also detects changed columns.

    Args:
        rows: Length and row length of each storage. Storages with few rows are covered completely. Larger ones share
            the rest of ``SPOTS_MAX``.
    """
    counts = {index: -(-nbytes // pitch) for index, (nbytes, pitch) in rows.items() if nbytes >= WORD_NBYTES}
    spots: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
    left = SPOTS_MAX
    for number, (index, count) in enumerate(sorted(counts.items(), key=lambda item: item[1])):
        taken = min(count, left // (len(counts) - number))
        if taken:
            left -= taken
            spots.append(_spots_in(index, *rows[index], chosen=(np.arange(taken, dtype=np.int64) * count) // taken))
    return np.concatenate(spots)


def _spots_in(index: int, nbytes: int, pitch: int, *, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    columns = chosen * _SPREAD % max(1, pitch // WORD_NBYTES) * WORD_NBYTES
    offsets = np.minimum(chosen * pitch + columns, nbytes - WORD_NBYTES)
    return np.stack((np.full_like(offsets, index), offsets), axis=1)
