"""Protects the merge of parts: every byte exactly once, chunks and frames once, and the tree that ranks agree on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import MalformedError, UsageError
from ckstore.format.manifest import Manifest, decode_manifest
from ckstore.format.records import DecisionsRecord, LogicalRecord, encode_inner
from ckstore.format.tree import ConvertedNode, DictNode, ListNode, Node, TensorNode, TupleNode, ValueNode
from ckstore.hashing import chunk_id_of
from ckstore.ranks.merge import Merged, Merger
from ckstore.ranks.messages import Done, encode_message
from ckstore.ranks.part import RANGE, Part, Skeleton
from ckstore.ranks.replicas import compare
from ckstore.ranks.union import merge_trees, unite
from support.rank_parts import MESH, Entry, PartMaker, by_digest, sample_parts, skeleton_of

RECORD = LogicalRecord(
    run="main",
    seq=1,
    step=10,
    time_ns=1_750_000_000_000_000_000,
    parent=None,
    origin_id=None,
    is_archival=False,
    fidelity="exact",
    metrics={},
)
STORE_ID = bytes(range(16))


def merged(parts: list[Part], skeletons: dict[bytes, Skeleton], merger: Merger | None = None) -> Merged:
    merger = merger or Merger(Limits())
    return merger.merge(merger.unite(parts, skeletons), parts)


def manifest_of(found: Merged) -> Manifest:
    header, content = found.encode(RECORD, STORE_ID, limits=Limits())
    manifest = decode_manifest(content)
    assert manifest.header == header
    return manifest


def state_of(manifest: Manifest) -> DictNode:
    root = manifest.tree
    assert isinstance(root, ConvertedNode)
    assert isinstance(root.child, DictNode)
    state = root.child.children[0]
    assert isinstance(state, DictNode)
    return state


def item(node: Node, key: object) -> Node:
    assert isinstance(node, DictNode)
    return dict(zip(node.keys, node.children, strict=True))[key]  # type: ignore[index]


def per_rank(node: Node) -> dict[int, Node]:
    assert isinstance(node, ConvertedNode)
    assert node.name == "ckstore:per_rank"
    assert isinstance(node.child, DictNode)
    return dict(zip(node.child.keys, node.child.children, strict=True))  # type: ignore[arg-type]


def test_shards_of_four_ranks_are_one_tensor():
    parts, skeletons = sample_parts()
    manifest = manifest_of(merged(parts, skeletons))
    assert manifest.tensors[0].shape == (8, 16)
    assert [piece.nbytes for piece in manifest.storages[0].pieces] == [128] * 4
    ids = [manifest.chunks[piece.chunk].chunk_id for piece in manifest.storages[0].pieces]
    assert ids == [bytes(part.chunks["chunk_id"][0]) for part in parts]
    assert [storage.nbytes for storage in manifest.storages] == [512, 12]
    assert len(manifest.packs) == 4
    assert manifest.header.bytes_written == sum(part.bytes_written for part in parts)
    assert manifest.decisions is not None
    assert [decision.full_bits for decision in manifest.decisions.storages] == [9.0, 9.0]


def test_the_root_says_who_contributed_what():
    parts, skeletons = sample_parts()
    root = manifest_of(merged(parts, skeletons)).tree
    assert isinstance(root, ConvertedNode)
    assert root.name == "ckstore:ranks"
    assert item(root.child, "world") == ValueNode("int", 4)
    assert item(root.child, "attempt") == ValueNode("bytes", parts[0].attempt)
    (layout,) = item(root.child, "layouts").children  # type: ignore[union-attr]
    assert item(layout, "tensors") == ListNode((ValueNode("int", 0),))
    assert item(layout, "placements") == ValueNode("str", MESH.placements)
    (mesh,) = item(root.child, "meshes").children  # type: ignore[union-attr]
    assert item(mesh, "shape") == ListNode((ValueNode("int", 4),))
    ranks = item(root.child, "ranks").children  # type: ignore[union-attr]
    assert [item(rank, "nbytes") for rank in ranks] == [ValueNode("int", n) for n in (140, 128, 128, 128)]
    assert [item(rank, "host") for rank in ranks] == [ValueNode("str", f"host{n}") for n in (0, 0, 1, 1)]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_gap_and_overlap_is_refused(data):
    world = data.draw(st.integers(1, 5))
    skeleton = skeleton_of({"a": Entry((6, 5), is_shard=True), "b": Entry((0,)), "c": Entry((7,))})
    makers = [PartMaker(rank, skeleton) for rank in range(world)]
    ranges = []
    for unit, nbytes in ((0, 120), (2, 28)):
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, nbytes // 4 - 1), max_size=4))), nbytes // 4]
        ranges += [(unit, 4 * lo, 4 * (hi - lo)) for lo, hi in itertools.pairwise(cuts)]
    for at in ranges:
        makers[data.draw(st.integers(0, world - 1))].write(*at)
    manifest = manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton])))
    assert sum(len(storage.pieces) for storage in manifest.storages) == len(ranges)
    victim = makers[data.draw(st.sampled_from([m.rank for m in makers if m.ranges]))]
    row = data.draw(st.integers(0, len(victim.ranges) - 1))
    unit, offset, nbytes, chunk, _ = victim.ranges[row]
    change = data.draw(st.sampled_from(["drop", "shorter", "later", "twice"]))
    if change == "drop":
        del victim.ranges[row]
    elif change == "twice":
        makers[0].ranges.append((unit, offset, nbytes, 0, 0))
        makers[0].chunks = makers[0].chunks or [(bytes([1]) * 32, nbytes, 4, True, 0)]
    else:
        victim.ranges[row] = (unit, offset + (change == "later"), nbytes - 1, chunk, 0)
    with pytest.raises(UsageError) as caught:
        merged([maker.part() for maker in makers], by_digest([skeleton]))
    assert str(caught.value.where) == "ac"[unit // 2]


def test_a_thousand_gaps_and_overlaps_are_refused():
    rng = np.random.default_rng(1)
    names = ("rows", "tiles", "plain")
    skeleton = skeleton_of(
        {
            "rows": Entry((64, 16), is_shard=True),
            "tiles": Entry((32, 32), is_shard=True, cuts=((), (8, 24))),
            "plain": Entry((1024,)),
        }
    )
    makers = [PartMaker(rank, skeleton) for rank in range(4)]
    for unit in range(3):
        edges = [0, *sorted(rng.choice(1023, 11, replace=False) + 1), 1024]
        for lo, hi in itertools.pairwise(edges):
            makers[rng.integers(4)].write(unit, 4 * int(lo), 4 * int(hi - lo))
    for maker in makers:
        # Every rank holds the plain tensor, and has compared all of it.
        maker.check(2, 0, 4096, "x")
    parts, skeletons = [maker.part() for maker in makers], by_digest([skeleton])
    merger = Merger(Limits())
    merged(parts, skeletons, merger)
    for _ in range(1000):
        rank = int(rng.choice([part.rank for part in parts if len(part.ranges)]))
        rows = [*map(list, parts[rank].ranges.tolist())]
        unit, offset, nbytes, *_ = row = rows[rng.integers(len(rows))]
        by = int(rng.integers(1, nbytes))
        before, after = offset, 4096 - offset - nbytes
        change = rng.choice(["drop", "shorten", "shift", "repeat", "extend"])
        if change == "drop":
            rows.remove(row)
        elif change == "shorten":
            row[2] -= by
        elif change == "shift":
            row[1] += min(by, after) if after else -min(by, before)
        elif change == "extend":
            row[1] -= min(by, before)
            row[2] += min(by, before) or min(by, after)
        else:
            rows.append([unit, offset + by - 1, nbytes - by + 1, *row[3:]])
        ranges = np.array([*map(tuple, rows)], RANGE)
        wrong = [replace(part, ranges=ranges) if part.rank == rank else part for part in parts]
        with pytest.raises(UsageError, match=r"(no rank contributes|several ranks contribute) bytes") as caught:
            merged(wrong, skeletons, merger)
        assert caught.value.where == names[unit]
    merged(parts, skeletons, merger)


def test_the_error_names_the_missing_bytes_and_the_ranks_around_them():
    parts, skeletons = sample_parts()
    parts[2] = replace(parts[2], ranges=parts[2].ranges[:0])
    with pytest.raises(
        UsageError, match=r"no rank contributes bytes 256 to 384 of 512, from element \[4, 0\]"
    ) as caught:
        merged(parts, skeletons)
    assert caught.value.facts["ranks"] == [1, 3]
    assert caught.value.where == "w"


def test_a_chunk_of_several_ranks_is_stored_once():
    skeleton = skeleton_of({"w": Entry((8, 16), is_shard=True)})
    makers = [PartMaker(rank, skeleton) for rank in range(4)]
    for maker in makers:
        maker.write(0, 128 * maker.rank, 128, "zeros")
    manifest = manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton])))
    assert (len(manifest.chunks), len(manifest.frames), len(manifest.packs)) == (1, 1, 1)
    assert [piece.chunk for piece in manifest.storages[0].pieces] == [0] * 4
    assert (manifest.header.chunks_new, manifest.header.chunks_reused) == (4, 0)


def test_of_two_frames_of_a_chunk_the_one_with_fewer_bases_is_listed():
    skeleton = skeleton_of({"w": Entry((8, 16), is_shard=True)})
    makers = [PartMaker(rank, skeleton) for rank in range(2)]
    # Rank 0 has x upon y; rank 1 has y upon x. Either alone would do; both would be a cycle.
    makers[0].frame(bytes([2]) * 32, 64)
    makers[0].write(0, 0, 256, "x", base=0)
    makers[1].write(0, 256, 256, "x")
    makers[1].frame(bytes([2]) * 32, 64, base=0)
    manifest = manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton])))
    (frame,) = manifest.frames
    assert (frame.depth, frame.base, len(manifest.packs)) == (0, -1, 1)
    assert manifest.packs[0].pack_id == bytes(makers[1].part().packs["pack_id"][0])


def test_bases_are_listed_before_their_users():
    skeleton = skeleton_of({"w": Entry((8, 16), is_shard=True)})
    makers = [PartMaker(rank, skeleton) for rank in range(2)]
    makers[0].frame(bytes([3]) * 32, 64)
    makers[0].frame(bytes([2]) * 32, 64, base=0)
    makers[0].write(0, 0, 256, "x", base=1)
    makers[1].frame(bytes([2]) * 32, 64)
    makers[1].write(0, 256, 256, "y", base=0)
    manifest = manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton])))
    assert sorted(frame.depth for frame in manifest.frames) == [0, 1, 1]
    assert bytes([3]) * 32 not in {frame.chunk_id for frame in manifest.frames}


def test_an_unchanged_layout_is_merged_again_with_other_chunks():
    merger = Merger(Limits())
    first = merged(*sample_parts(), merger)
    again = merged(*sample_parts(), merger)
    assert again.columns.pieces is first.columns.pieces
    parts, skeletons = sample_parts()
    parts[1].chunks["chunk_id"][0] = parts[1].frames["chunk_id"][0] = bytes([9]) * 32
    other = merged(parts, skeletons, merger)
    assert other.columns.pieces is first.columns.pieces
    assert manifest_of(other) == manifest_of(merged(parts, skeletons))


def test_a_changed_layout_is_noticed():
    merger = Merger(Limits())
    merged(*sample_parts(), merger)
    parts, skeletons = sample_parts()
    parts[3] = replace(parts[3], ranges=parts[3].ranges[:0])
    with pytest.raises(UsageError):
        merged(parts, skeletons, merger)


def test_chunks_that_become_equal_are_noticed():
    merger = Merger(Limits())
    merged(*sample_parts(), merger)
    parts, skeletons = sample_parts()
    for part in parts[1:3]:
        part.chunks["chunk_id"][0] = part.frames["chunk_id"][0] = bytes([9]) * 32
    found = manifest_of(merged(parts, skeletons, merger))
    assert [piece.chunk for piece in found.storages[0].pieces] == [0, 2, 2, 3]


@pytest.mark.parametrize("bases", [("none", "none"), ("previous", "previous"), ("none", "previous")])
def test_decisions_of_ranks(bases):
    parts, skeletons = sample_parts()
    for rank in range(4):
        base = bases[rank % 2]
        seqs = (None, None) if base == "none" else (7, 5)
        record = DecisionsRecord(base=base, base_seq=seqs[0], keyframe_seq=seqs[1], reason="why")
        parts[rank] = replace(parts[rank], decisions=record)
    decisions = manifest_of(merged(parts, skeletons)).decisions
    assert decisions is not None
    expected = bases[0] if bases[0] == bases[1] else "mixed"
    assert decisions.base == expected
    assert decisions.base_seq == (None if expected == "none" else 7)


def parts_of(*skeletons: Skeleton) -> tuple[list[Part], dict[bytes, Skeleton]]:
    """Return parts of ranks with these skeletons; the first rank that has a unit writes it."""
    makers = [PartMaker(rank, skeleton) for rank, skeleton in enumerate(skeletons)]
    union = unite(list(by_digest(skeletons).values()), [list(by_digest(skeletons)).index(s.digest) for s in skeletons])
    done: set[object] = set()
    for maker in makers:
        numbers = union.numbers[int(union.skeleton_of[maker.rank])]
        for local, unit in enumerate(maker.skeleton.units):
            number = int(numbers[local])
            key = (number, maker.rank) if number in union.per_rank else number
            if key not in done and unit.nbytes:
                done.add(key)
                maker.write(local, 0, unit.nbytes)
    return [maker.part() for maker in makers], by_digest(skeletons)


def test_keys_of_all_ranks_are_united():
    manifest = manifest_of(
        merged(
            *parts_of(
                skeleton_of({"a": Entry((2,)), "b": Entry((3,))}),
                skeleton_of({"b": Entry((3,)), "c": Entry((4,)), "n": Entry(value=1)}),
            )
        )
    )
    state = state_of(manifest)
    assert state.keys == ("a", "b", "c", "n")
    assert [manifest.tensors[n.tensor].shape for n in state.children if isinstance(n, TensorNode)] == [(2,), (3,), (4,)]


def test_values_that_differ_are_kept_per_rank():
    skeletons = [skeleton_of({"epoch": Entry(value=rank // 2), "w": Entry((3,))}) for rank in range(4)]
    manifest = manifest_of(merged(*parts_of(*skeletons)))
    assert per_rank(item(state_of(manifest), "epoch")) == {rank: ValueNode("int", rank // 2) for rank in range(4)}
    assert item(state_of(manifest), "w") == TensorNode(0)


def test_tensors_of_different_shapes_are_kept_per_rank():
    skeletons = [skeleton_of({"w": Entry((rank + 1,))}) for rank in range(3)]
    manifest = manifest_of(merged(*parts_of(*skeletons)))
    found = per_rank(item(state_of(manifest), "w"))
    tensors = [manifest.tensors[node.tensor] for node in found.values()]  # type: ignore[union-attr]
    assert [tensor.shape for tensor in tensors] == [(1,), (2,), (3,)]


def test_what_is_declared_per_rank_is_kept_per_rank_even_if_it_is_equal():
    skeleton = skeleton_of({"rng": Entry((4,)), "w": Entry((3,))}, per_rank=(("rng",),))
    manifest = manifest_of(merged(*parts_of(skeleton, skeleton, skeleton)))
    found = per_rank(item(state_of(manifest), "rng"))
    storages = [manifest.tensors[node.tensor].storage for node in found.values()]  # type: ignore[union-attr]
    assert (list(found), len(set(storages)), len(manifest.storages)) == ([0, 1, 2], 3, 4)


def test_a_shard_must_be_of_the_same_tensor_on_all_ranks():
    skeletons = [skeleton_of({"w": Entry((8, 16 + rank), is_shard=True)}) for rank in range(2)]
    with pytest.raises(UsageError, match=r"shape: \(8, 16\) on rank 0, \(8, 17\) on rank 1") as caught:
        unite(skeletons, [0, 1])
    assert caught.value.where == "w"


def replicas(contents: list[str], *, is_shard: bool = False) -> tuple[list[Part], dict[bytes, Skeleton]]:
    """Return parts of ranks that hold 64 bytes with these contents; the ranks write 16 bytes each, in turn."""
    skeleton = skeleton_of({"w": Entry((16,), is_shard=is_shard)})
    makers = [PartMaker(rank, skeleton) for rank in range(len(contents))]
    for number in range(4):
        maker = makers[number % len(makers)]
        maker.write(0, 16 * number, 16, f"{contents[maker.rank]} {number}")
        for other, content in zip(makers, contents, strict=True):
            other.check(0, 16 * number, 16, f"{content} {number}")
    return [maker.part() for maker in makers], by_digest([skeleton])


def test_equal_replicas_are_one_storage():
    parts, skeletons = replicas(["x"] * 3)
    union = Merger(Limits()).unite(parts, skeletons)
    assert compare(union, parts).differences == ()
    assert len(manifest_of(merged(parts, skeletons)).storages) == 1


def test_replicas_that_differ_are_named_and_completed():
    parts, skeletons = replicas(["x", "x", "y", "x"])
    merger = Merger(Limits())
    union = merger.unite(parts, skeletons)
    comparison = compare(union, parts)
    (difference,) = comparison.differences
    assert (difference.path, difference.ranks, difference.offset) == (("w",), (2,), 0)
    # Rank 2 has written the third quarter only; the others lack just this quarter.
    assert comparison.more == {0: ((0, 32, 16),), 2: ((0, 0, 32), (0, 48, 16))}
    with pytest.raises(UsageError, match="no rank contributes"):
        merger.merge(union, parts, comparison)
    makers = [PartMaker(rank, next(iter(skeletons.values())), pack_name=f"more {rank}") for rank in range(4)]
    for rank, ranges in comparison.more.items():
        for at in ranges:
            makers[rank].write(*at, "xxyx"[rank])
        extra = makers[rank].part()
        own = parts[rank]
        ranges_of, frames = extra.ranges.copy(), extra.frames.copy()
        ranges_of["chunk"] += len(own.chunks)
        frames["pack"] += len(own.packs)
        joined = {
            "ranges": np.concatenate([own.ranges, ranges_of]),
            "chunks": np.concatenate([own.chunks, extra.chunks]),
            "packs": np.concatenate([own.packs, extra.packs]),
            "frames": np.concatenate([own.frames, frames]),
        }
        parts[rank] = replace(own, **joined)
    comparison = compare(union, parts)
    assert comparison.more == {}
    found = merger.merge(union, parts, comparison)
    assert len(found.warnings) == 1
    assert "w: a tensor differs on rank 2" in found.warnings[0]
    manifest = manifest_of(found)
    nodes = per_rank(item(state_of(manifest), "w"))
    assert [node.tensor for node in nodes.values()] == [0, 0, 1, 0]  # type: ignore[union-attr]
    assert [storage.nbytes for storage in manifest.storages] == [64, 64]


@pytest.mark.parametrize("contents", ["xxx", "xyx", "xyz"])
def test_copies_that_every_rank_has_written_are_stored_once_for_each_content(contents):
    skeleton = skeleton_of({"rng": Entry((4,)), "w": Entry((12, 4), is_shard=True)})
    makers = [PartMaker(rank, skeleton) for rank in range(3)]
    for maker, content in zip(makers, contents, strict=True):
        maker.write(0, 0, 16, f"{content}")
        maker.check(0, 0, 16, content)
        maker.write(1, 64 * maker.rank, 64)
    found = merged([maker.part() for maker in makers], by_digest([skeleton]))
    manifest = manifest_of(found)
    assert len(manifest.storages) == 1 + len(set(contents))
    node = item(state_of(manifest), "rng")
    if len(set(contents)) == 1:
        assert node == TensorNode(0)
        assert found.warnings == ()
        return
    storages = [manifest.tensors[each.tensor].storage for each in per_rank(node).values()]  # type: ignore[union-attr]
    assert [[a == b for b in storages] for a in storages] == [[a == b for b in contents] for a in contents]


def test_copies_are_not_taken_for_equal_when_a_rank_has_not_compared_them_this_time():
    skeleton = skeleton_of({"rng": Entry((4,))})
    makers = [PartMaker(rank, skeleton) for rank in range(2)]
    for maker in makers:
        maker.write(0, 0, 16, "x")
        maker.check(0, 0, 16, "x")
    merger = Merger(Limits())
    assert len(manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton]), merger)).storages) == 1
    makers[1].checks = []
    with pytest.raises(UsageError, match="several ranks contribute bytes 0 to 16 of 16: 0 and 1"):
        merged([maker.part() for maker in makers], by_digest([skeleton]), merger)


def test_a_chunk_that_only_repeats_what_another_rank_has_written_is_not_listed():
    skeleton = skeleton_of({"rng": Entry((4,)), "w": Entry((8, 4), is_shard=True)})
    makers = [PartMaker(rank, skeleton) for rank in range(2)]
    for maker in makers:
        # The same bytes, but in another chunk.
        maker.write(0, 0, 16, f"{maker.rank}")
        maker.check(0, 0, 16, "x")
        maker.write(1, 64 * maker.rank, 64)
    manifest = manifest_of(merged([maker.part() for maker in makers], by_digest([skeleton])))
    assert (len(manifest.chunks), len(manifest.frames), len(manifest.packs)) == (3, 3, 2)


def test_shards_that_differ_are_named_and_stored_once():
    parts, skeletons = replicas(["x", "y", "x"], is_shard=True)
    merger = Merger(Limits())
    union = merger.unite(parts, skeletons)
    comparison = compare(union, parts)
    # Rank 1 has written the second quarter, and rank 2 the third, of which it has the same bytes as rank 0.
    assert (comparison.more, comparison.dropped) == ({0: ((0, 16, 16),)}, {1: [0]})
    with pytest.raises(UsageError, match="no rank contributes bytes 16 to 32"):
        merger.merge(union, parts, comparison)
    maker = PartMaker(0, next(iter(skeletons.values())), pack_name="more")
    maker.write(0, 16, 16, "x 1")
    parts[0] = parts[0].joined(maker.part())
    found = merger.merge(union, parts, comparison)
    assert found.warnings[0].startswith("w: a shard differs on rank 1 from ranks 0, 2, first in bytes 0 to 16; that of")
    manifest = manifest_of(found)
    (storage,) = manifest.storages
    expected = [chunk_id_of(f"x {number} 16".encode()) for number in range(4)]
    assert [manifest.chunks[piece.chunk].chunk_id for piece in storage.pieces] == expected


def test_warnings_fit_into_a_message_however_much_differs():
    skeleton = skeleton_of({f"{'long name ' * 20}{number}": Entry((1,)) for number in range(2000)})
    parts = []
    for rank in range(2):
        maker = PartMaker(rank, skeleton)
        for unit in range(2000):
            maker.write(unit, 0, 4, f"{rank}")
            maker.check(unit, 0, 4, f"{rank}")
        parts.append(maker.part(warnings=tuple(f"{'long text ' * 20}{number}" for number in range(rank, 2000))))
    warnings = merged(parts, by_digest([skeleton])).warnings
    assert sum("a tensor differs on rank 1 from rank 0" in warning for warning in warnings) == 8
    assert warnings[8] == "1992 further tensors differ between ranks"
    assert warnings[-1] == f"{2000 - (len(warnings) - 10)} further warnings left out"
    assert 120_000 < len(encode_message(Done(1, encode_inner(warnings)))) < 140_000


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from("xyz"), min_size=1, max_size=6))
def test_each_rank_gets_a_complete_copy_of_its_own_bytes(contents):
    parts, skeletons = replicas(contents)
    union = Merger(Limits()).unite(parts, skeletons)
    comparison = compare(union, parts)
    if len(set(contents)) == 1:
        assert not comparison.variants
        return
    copies = comparison.variants[0].tolist()
    assert [[a == b for b in copies] for a in copies] == [[a == b for b in contents] for a in contents]
    written = {(copies[n % len(contents)], 16 * n, 16) for n in range(4)}
    for rank, ranges in comparison.more.items():
        written |= {(copies[rank], lo, nbytes) for _, lo, nbytes in ranges}
    for copy in set(copies):
        assert sum(nbytes for each, _, nbytes in written if each == copy) == 64


def test_ranks_must_compare_the_same_pieces():
    skeleton = skeleton_of({"w": Entry((16,))})
    makers = [PartMaker(rank, skeleton) for rank in range(2)]
    makers[0].check(0, 0, 64, "x")
    makers[1].check(0, 32, 32, "x")
    parts = [maker.part() for maker in makers]
    with pytest.raises(MalformedError, match="ranks 0 and 1 have compared different pieces"):
        compare(Merger(Limits()).unite(parts, by_digest([skeleton])), parts)


TREES: list[tuple[list[Node], Node | None]] = [
    ([ListNode((ValueNode("int", 1),)), ListNode((ValueNode("int", 1), ValueNode("int", 2)))], None),
    (
        [TupleNode((ValueNode("int", 1), ValueNode("int", n))) for n in (2, 3)],
        TupleNode(
            (
                ValueNode("int", 1),
                ConvertedNode("ckstore:per_rank", DictNode("dict", (0, 1), (ValueNode("int", 2), ValueNode("int", 3)))),
            )
        ),
    ),
    ([ConvertedNode("ckstore:set", ListNode((ValueNode("int", n),))) for n in (2, 3)], None),
    ([DictNode("dict", (), ()), DictNode("OrderedDict", (), ())], None),
    ([DictNode("dict", ("a",), (ValueNode("int", 1),)), ValueNode("none", None)], None),
]


@pytest.mark.parametrize(("nodes", "expected"), TREES)
def test_nodes_that_differ(nodes, expected):
    union = unite([Skeleton(node, (), ()) for node in nodes], [0, 1])
    found = merge_trees(union, {}).tree
    if expected is None:
        assert per_rank(found) == dict(enumerate(nodes))
    else:
        assert found == expected


def test_one_tensor_at_two_paths_stays_one_tensor():
    tied = skeleton_of({"a": Entry((2,)), "b": Entry((3,))})
    tied = replace(tied, tree=DictNode("dict", ("a", "b"), (TensorNode(0), TensorNode(0))), tensors=tied.tensors[:1])
    tied = replace(tied, units=tied.units[:1])
    other = replace(tied, tree=DictNode("dict", ("a", "c"), (TensorNode(0), TensorNode(0))))
    tree = merge_trees(unite([tied, other], [0, 1]), {}).tree
    assert tree == DictNode("dict", ("a", "b", "c"), (TensorNode(0),) * 3)


def test_parts_of_other_attempts_or_ranks_are_refused():
    parts, skeletons = sample_parts()
    for wrong in (
        replace(parts[1], attempt=bytes(16)),
        replace(parts[1], rank=2),
        replace(parts[1], skeleton=bytes(32)),
    ):
        with pytest.raises(MalformedError, match="the part of rank 1"):
            merged([parts[0], wrong, *parts[2:]], skeletons)


def tied_skeletons(*, is_shard: bool) -> list[Skeleton]:
    """Return the skeletons of two ranks of which the first has tied ``b`` to ``a``."""
    free = skeleton_of({name: Entry((8, 16), is_shard=is_shard) for name in ("a", "b")})
    tied = replace(free, tensors=tuple(replace(each, storage=0) for each in free.tensors), units=free.units[:1])
    return [tied, free]


def test_tensors_that_only_some_ranks_have_tied_are_named():
    skeletons = tied_skeletons(is_shard=False)
    makers = [PartMaker(rank, skeleton) for rank, skeleton in enumerate(skeletons)]
    makers[0].write(0, 0, 512, "a")
    makers[1].write(1, 0, 512, "b")
    for maker in makers:
        maker.check(0, 0, 512, "a")
    found = merged([maker.part() for maker in makers], by_digest(skeletons))
    assert found.warnings == (
        "b: shares memory with a on rank 0 only, so it was stored for each rank; tie these tensors on all ranks, or on "
        "none",
    )
    assert len(per_rank(item(state_of(manifest_of(found)), "b"))) == 2


def test_shards_that_only_some_ranks_have_tied_are_refused_by_name():
    skeletons = tied_skeletons(is_shard=True)
    makers = [PartMaker(rank, skeleton) for rank, skeleton in enumerate(skeletons)]
    makers[0].write(0, 0, 256)
    makers[1].write(0, 256, 256)
    makers[1].write(1, 256, 256)
    with pytest.raises(UsageError, match=r"shares memory with a on rank 0, and not on rank 1: b\. Tie these") as caught:
        merged([maker.part() for maker in makers], by_digest(skeletons))
    assert (caught.value.path, caught.value.ranks) == (("b",), [0, 1])
