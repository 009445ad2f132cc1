"""Protects what ranks send: it round-trips, what is damaged or contradicts itself is refused, and real writes merge."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.commit.chunk_writer import WriteResult
from ckstore.commit.chunking import CommitPlan
from ckstore.commit.commit import CommitRequest, refresh_bases, write_unpublished
from ckstore.commit.unpublished import Unpublished
from ckstore.config import Limits, Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import CkstoreError, MalformedError, UnsupportedError, UsageError
from ckstore.format.manifest import decode_manifest
from ckstore.format.many_ranks import state_of
from ckstore.format.records import LogicalRecord
from ckstore.format.tree import DictNode, OtherKey, TupleNode, ValueNode
from ckstore.format.wire import xxh3_64
from ckstore.io.url import backend_for
from ckstore.ranks.arrays import ArraySpec, Layout, RankState
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.merge import Merger
from ckstore.ranks.part import Part, Skeleton, make_part
from ckstore.ranks.writing import Share, checks_of_owned, checks_of_rest
from ckstore.results import Stopwatch
from ckstore.store.repository import Repository
from ckstore.store.store_config import create_store, read_store_record
from support.format_samples import sample_loss
from support.rank_parts import ATTEMPT, Entry, sample_parts, skeleton_of

RECORD = LogicalRecord(
    run="main", seq=1, step=1, time_ns=1, parent=None, origin_id=None, is_archival=False, fidelity="exact", metrics={}
)
PARTS, SKELETONS = sample_parts()
(SKELETON,) = SKELETONS.values()
STEP = 4 << 20
COLUMNS = ("ranges", "chunks", "packs", "frames", "checks", "unit_decisions")


def is_same(left: Part, right: Part) -> bool:
    columns = all(getattr(left, name).tobytes() == getattr(right, name).tobytes() for name in COLUMNS)
    others = ("rank", "attempt", "skeleton", "host", "decisions", "bytes_written", "chunks_new", "warnings")
    return columns and all(getattr(left, name) == getattr(right, name) for name in others)


def sealed(content: bytes) -> bytes:
    """Return changed content with a seal that fits."""
    return content[:-8] + xxh3_64(content[:-8]).to_bytes(8, "little")


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"rank {part.rank}")
def test_a_part_round_trips(part):
    part = replace(part, warnings=("naïve",))
    assert is_same(Part.decode(part.encode()), part)


def test_a_skeleton_round_trips():
    mesh = Layout(("dp", "tp"), (2, 1), (0, 1), "(Shard(dim=0), Replicate())")
    found = skeleton_of({"w": Entry((8, 6), is_shard=True), "n": Entry(value=1)}, layout=mesh)
    (unit,) = found.units
    key = OtherKey(TupleNode((ValueNode("int", 1), ValueNode("str", "a"))))
    found = replace(
        found,
        units=(replace(unit, path=("w", 3, key), array=ArraySpec((8, 6), ((), (2, 4)), 0)),),
        per_rank=(("n",), ()),
        replicated=((("w",), 1 / 64),),
    )
    again = Skeleton.decode(found.encode(rank=5))
    assert again == found
    assert (again.digest, again.tables_digest) == (found.digest, found.tables_digest)


def test_the_tables_of_a_skeleton_do_not_depend_on_plain_values():
    one, two = (skeleton_of({"w": Entry((3,)), "step": Entry(value=step)}) for step in (1, 2))
    assert one.digest != two.digest
    assert one.tables_digest == two.tables_digest


@pytest.mark.parametrize(("kind", "content"), [(Part, PARTS[3].encode()), (Skeleton, SKELETON.encode(rank=3))])
def test_another_version_is_refused_by_name(kind, content):
    newer = sealed(content[:8] + struct.pack("<H", 7) + content[10:])
    with pytest.raises(UnsupportedError, match=r"rank 3 sends .* of version 7, and this rank reads version 1"):
        kind.decode(newer)


@pytest.mark.parametrize(("kind", "content"), [(Part, PARTS[0].encode()), (Skeleton, SKELETON.encode())])
def test_every_flipped_bit_and_truncation_is_found(kind, content):
    flipped = bytearray(content)
    for at in range(len(content)):
        for bit in (0, 7):
            flipped[at] ^= 1 << bit
            with pytest.raises(CkstoreError):
                kind.decode(bytes(flipped))
            flipped[at] ^= 1 << bit
        with pytest.raises(CkstoreError):
            kind.decode(content[:at])
    with pytest.raises(CkstoreError):
        kind.decode(content + b"\0")


mutations = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 3), mutations)
def test_a_part_with_a_fitting_seal_is_merged_or_refused(rank, changes):
    content = bytearray(PARTS[rank].encode())
    for at, value in changes:
        content[at % (len(content) - 8)] = value
    try:
        part = Part.decode(sealed(bytes(content)))
        parts = [*PARTS[:rank], part, *PARTS[rank + 1 :]]
        merger = Merger(Limits())
        found = merger.merge(merger.unite(parts, SKELETONS), parts)
        _, encoded = found.encode(RECORD, bytes(16), limits=Limits())
    except CkstoreError:
        return
    decode_manifest(encoded)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(COLUMNS), st.integers(0, 3), st.data())
def test_any_number_in_a_column_is_merged_or_refused(column, rank, data):
    rows = getattr(PARTS[rank], column).copy()
    if not len(rows):
        return
    name = data.draw(st.sampled_from(rows.dtype.names))
    if rows.dtype[name].kind == "V":
        rows[name][0] = bytes(rows.dtype[name].itemsize)
    else:
        top = 1 << 8 * rows.dtype[name].itemsize
        numbers = st.sampled_from([0, 1, 2, 63, 128, 512, top // 2, top - 128, top - 1])
        rows[name][data.draw(st.integers(0, len(rows) - 1))] = data.draw(numbers) % top
    parts = list(PARTS)
    parts[rank] = Part.decode(replace(PARTS[rank], **{column: rows}).encode())
    merger = Merger(Limits())
    try:
        found = merger.merge(merger.unite(parts, SKELETONS), parts)
        _, encoded = found.encode(RECORD, bytes(16), limits=Limits())
    except CkstoreError:
        return
    decode_manifest(encoded)


@settings(deadline=None, max_examples=300)
@given(mutations)
def test_a_skeleton_with_a_fitting_seal_is_decoded_or_refused(changes):
    content = bytearray(SKELETON.encode())
    for at, value in changes:
        content[at % (len(content) - 8)] = value
    try:
        found = Skeleton.decode(sealed(bytes(content)))
    except CkstoreError:
        return
    assert Skeleton.decode(found.encode()) == found


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 508},
        {"element_width": 3},
        {"array": ArraySpec((8, 16), ((4,),), 0)},
        {"array": ArraySpec((8, 16), ((), (16,)), 0)},
        {"array": ArraySpec((8, 16), (), 1)},
        {"array": ArraySpec((7, 16), (), 0)},
    ],
)
def test_impossible_units_are_refused(change):
    wrong = replace(SKELETON, units=(replace(SKELETON.units[0], **change), *SKELETON.units[1:]))
    with pytest.raises(MalformedError):
        Skeleton.decode(wrong.encode())


class Rank:
    """One rank of a job, with a store handle of its own."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world = rank, world
        backend = backend_for(str(folder))
        self.repository = Repository(backend, read_store_record(backend), "main")
        self.bases = BaseCache()
        self._capture = RankCapture()

    def write(self, state: object, *, policy: Policy | None = None) -> tuple[Part, Skeleton]:
        """Write this rank's share: a third of a large unit, and every third small one."""
        captured: RankState = self._capture.capture(state)
        spans = {}
        for number, unit in enumerate(captured.units):
            third = STEP * self.rank
            is_whole = unit.nbytes < STEP and number % self.world == self.rank
            spans[number] = [(0, unit.nbytes)] if is_whole else [(third, third + STEP)] if unit.nbytes > STEP else []
        share = Share.of(captured, spans)
        repository, bases = self.repository, self.bases
        repository.prepare_run()
        refresh_bases(repository, bases)
        bases.begin(0)
        request = CommitRequest(share.captured(captured), 1, policy or Policy(), None, {}, bases)
        unpublished = write_unpublished(repository, request, Stopwatch(SYSTEM_CLOCK))
        bases.discard_drafts()
        limits = repository.limits
        checks = [
            *checks_of_rest(captured, share.rest, limits),
            *checks_of_owned(captured, share, unpublished.plan, unpublished.stored, limits),
        ]
        skeleton = Skeleton.of(captured)
        part = make_part(
            unpublished,
            share.places,
            checks,
            rank=self.rank,
            attempt=ATTEMPT,
            skeleton=skeleton.digest,
            host="here",
        )
        return Part.decode(part.encode()), Skeleton.decode(skeleton.encode())


@pytest.fixture
def ranks(tmp_path):
    create_store(backend_for(str(tmp_path / "store")), SYSTEM_CLOCK, Limits())
    found = [Rank(rank, 3, tmp_path / "store") for rank in range(3)]
    yield found
    for rank in found:
        rank.repository.close()


def publish(ranks: list[Rank], states: list[object], merger: Merger, seq: int) -> list[str]:
    written = [rank.write(state) for rank, state in zip(ranks, states, strict=True)]
    parts, skeletons = [part for part, _ in written], {skeleton.digest: skeleton for _, skeleton in written}
    found = merger.merge(merger.unite(parts, skeletons), parts)
    repository = ranks[0].repository
    assert repository.manifests.claim(seq) == seq
    record = LogicalRecord(
        run="main",
        seq=seq,
        step=seq,
        time_ns=seq,
        parent=None,
        origin_id=None,
        is_archival=False,
        fidelity="exact",
        metrics={},
    )
    header, content = found.encode(record, repository.store_id, limits=repository.limits)
    repository.manifests.publish_encoded(header.name, content)
    manifest = decode_manifest(content)
    for rank in ranks:
        rank.repository.note_seq(seq)
        rank.repository.note_committed(manifest)
        rank.repository.newest = manifest
    return list(found.warnings)


def test_ranks_that_write_parts_of_equal_states_make_one_checkpoint(ranks, tmp_path):
    merger = Merger(ranks[0].repository.limits)
    rng = np.random.default_rng(0)
    state = {"big": rng.random(3 << 20).astype(np.float32), "small": np.arange(10), "step": 1, "none": np.empty(0)}
    assert publish(ranks, [state] * 3, merger, 1) == []
    manifest = ranks[0].repository.newest
    assert manifest is not None
    assert isinstance(state_of(manifest.tree), DictNode)
    assert manifest.header.bytes_state == sum(np.asarray(each).nbytes for each in list(state.values())[:2])
    assert len({frame.pack for frame in manifest.frames}) == 3
    assert publish(ranks, [{**state, "step": 2}] * 3, merger, 2) == []
    assert ranks[0].repository.newest is not None
    # Nothing is written again.
    assert ranks[0].repository.newest.header.chunks_new == 0
    assert ranks[0].repository.newest.frames == manifest.frames
    with ckstore.open(str(tmp_path / "store")) as store:
        assert store.verify(level="decode").is_clean


def test_a_quantizing_policy_is_refused():
    stored = WriteResult([], [], [], 0, 0, 0, 0, 0, 0, [], [], losses=(sample_loss(),))
    unpublished = Unpublished(CommitPlan((), ()), None, stored)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot quantize"):
        make_part(unpublished, [], [], rank=0, attempt=ATTEMPT, skeleton=bytes(32), host="")
