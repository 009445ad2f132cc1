"""Protects the layout of a slot: each byte has one place, and urgent and sampled bytes are copied first."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ckstore.background.arena import UNIT_NBYTES
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW, plan_layout
from ckstore.background.staged_head import places_to_sample
from ckstore.config import KIB, MIB, Limits


class Shape:
    def __init__(self, nbytes, element_width=4, is_float=True):
        self.nbytes, self.element_width, self.is_float = nbytes, element_width, is_float


shapes = st.lists(
    st.builds(
        Shape,
        st.sampled_from([0, 1, 4, 100, 64 * KIB, 300 * KIB, 4 * MIB, 4 * MIB + 8, 9 * MIB]),
        st.sampled_from([1, 2, 4, 8]),
        st.booleans(),
    ),
    max_size=12,
)


@given(shapes, st.data())
def test_each_byte_has_one_place_within_units(storages, data):
    kinds = data.draw(st.lists(st.sampled_from([NOW, LAZY, DEVICE_NOW, DEVICE_LAZY]), min_size=len(storages)))
    found = plan_layout(storages, kinds[: len(storages)], places_to_sample(storages, Limits()))
    places, copied = [], {index: [] for index in range(len(storages))}
    for kind, section in enumerate(found.sections):
        assert section.begin % UNIT_NBYTES == 0
        assert section.firsts[-1] == len(section.rows)
        excerpts = {row.place for row in found.samples if not row.width}
        are_read = [
            place in excerpts or found.places[index] + offset == place
            for index, offset, place, _ in section.rows.tolist()
        ]
        count = section.sample_row_count
        assert are_read == [False] * count + [True] * (len(section.rows) - count)
        for unit in range(section.unit_count):
            for index, offset, place, nbytes in section.rows_of(unit):
                assert place // UNIT_NBYTES == (place + nbytes - 1) // UNIT_NBYTES == section.first_unit + unit
                assert kinds[index] == kind
                places.append((place, place + nbytes))
                if found.places[index] + offset == place:
                    copied[index].append((offset, offset + nbytes))
    places.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
    assert not places or places[-1][1] <= found.end
    for index, storage in enumerate(storages):
        assert [offset for offset, _ in copied[index]] == [0, *(end for _, end in copied[index])][: len(copied[index])]
        assert (copied[index][-1][1] if copied[index] else 0) == storage.nbytes


def test_empty_storage_has_no_rows():
    found = plan_layout([Shape(0, 2), Shape(0, 4), Shape(64 * KIB, 1, False)], [NOW] * 3, [])
    assert found.samples == ()


def test_urgent_storages_come_first_then_plan_order():
    found = plan_layout([Shape(5 * MIB) for _ in range(6)], [LAZY, NOW, LAZY, NOW, LAZY, LAZY], [])
    assert sorted(range(6), key=lambda index: found.places[index]) == [1, 3, 0, 2, 4, 5]
    assert found.places[0] % UNIT_NBYTES == 0


def test_samples_and_small_storages_precede_large_ones():
    storages = [Shape(9 * MIB), Shape(1000), Shape(9 * MIB), Shape(2000)]
    found = plan_layout(storages, [NOW] * 4, places_to_sample(storages, Limits()))
    first = {index: place for place, index in sorted(zip(found.places, range(4), strict=True))}
    samples = [row for row in found.samples if row.width]
    assert samples
    assert max(row.place for row in samples) < min(found.places)
    assert max(first[1], first[3]) < min(first[0], first[2])
