"""Parts and skeletons of ranks whose packs exist only in name: input for merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckstore.config import Limits
from ckstore.format.columns import CHUNK, FRAME, PACK
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.location import NO_BASE_INDEX
from ckstore.format.many_ranks import tiles_node
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.records import DecisionsRecord, LogicalRecord
from ckstore.format.tensors import TensorSpec, count_of
from ckstore.format.tiles import Cuts
from ckstore.format.tree import DictNode, Node, TensorNode, ValueNode
from ckstore.format.wire import align_up
from ckstore.hashing import chunk_id_of, digest_of
from ckstore.ranks.arrays import ArraySpec, Layout, Unit
from ckstore.ranks.merge import Merger
from ckstore.ranks.part import CHECK, RANGE, UNIT_DECISION, Part, Skeleton
from support.format_samples import STORE_ID, TIME_NS

ATTEMPT = bytes(range(16))
MESH = Layout(("dp",), (4,), (0, 1, 2, 3), "(Shard(dim=0),)")


@dataclass
class Entry:
    """One leaf of a state: a plain tensor of float32, a shard of a tensor, row-major or in tiles, or a plain value."""

    shape: tuple[int, ...] = ()
    is_shard: bool = False
    value: object = None
    cuts: Cuts = ()


def skeleton_of(entries: Mapping[str, Entry], *, layout: Layout = MESH, **options: object) -> Skeleton:
    """Return the skeleton of a dict with these entries."""
    children: list[Node] = []
    tensors: list[TensorSpec] = []
    units: list[Unit] = []
    for name, entry in entries.items():
        if entry.value is not None:
            children.append(ValueNode(type(entry.value).__name__, entry.value))  # type: ignore[arg-type]
            continue
        stored = (count_of(entry.shape),) if entry.cuts else entry.shape
        strides = tuple(count_of(stored[axis + 1 :]) for axis in range(len(stored)))
        node = TensorNode(len(tensors))
        children.append(tiles_node(node, entry.shape, entry.cuts) if entry.cuts else node)
        tensors.append(TensorSpec("torch", "float32", stored, strides, len(units), 0))
        array = ArraySpec(entry.shape, entry.cuts, 0) if entry.is_shard else None
        units.append(Unit((name,), 4 * count_of(entry.shape), 4, True, array))
    layouts = (layout,) if any(entry.is_shard for entry in entries.values()) else ()
    tree = DictNode("dict", tuple(entries), tuple(children))
    return Skeleton(tree, tuple(tensors), tuple(units), layouts, **options)  # type: ignore[arg-type]


@dataclass
class PartMaker:
    """Collects what one rank writes. Every range is a chunk of its own, whose content is drawn from a text."""

    rank: int
    skeleton: Skeleton
    pack_name: str = ""
    ranges: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    chunks: list[tuple[bytes, int, int, bool, int]] = field(default_factory=list)
    frames: list[tuple[bytes, int, int, int, int, int]] = field(default_factory=list)
    checks: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    end: int = SUPERHEADER_NBYTES

    def write(self, unit: int, offset: int, nbytes: int, content: str = "", *, base: int = NO_BASE_INDEX) -> None:
        """Contribute a range, whose bytes are a function of ``content``; by default of the rank and the place."""
        text = content or f"{self.rank} {unit} {offset}"
        chunk_id = chunk_id_of(f"{text} {nbytes}".encode())
        known = [row[0] for row in self.chunks]
        if chunk_id not in known:
            self.chunks.append((chunk_id, nbytes, 4, True, 0))
            self.frame(chunk_id, nbytes, base=base)
            known.append(chunk_id)
        self.ranges.append((unit, offset, nbytes, known.index(chunk_id), 0))

    def frame(self, chunk_id: bytes, nbytes: int, *, base: int = NO_BASE_INDEX) -> None:
        """List a frame, without a chunk."""
        depth = 0 if base == NO_BASE_INDEX else self.frames[base][5] + 1
        self.frames.append((chunk_id, self.end, nbytes, 0, base, depth))
        self.end = align_up(self.end + FRAME_HEADER_NBYTES + nbytes, 64)

    def check(self, unit: int, offset: int, nbytes: int, content: str) -> None:
        """Send the digest of a replicated range."""
        self.checks.append((unit, offset, nbytes, digest_of(content.encode())[:16]))

    def part(self, decisions: DecisionsRecord | None = None, **changes: object) -> Part:
        """Return the part."""
        name = (self.pack_name or f"pack {self.rank}").encode()
        directory = align_up(DIRECTORY_ENTRY_NBYTES * len(self.frames), PACK_ALIGN)
        nbytes = align_up(self.end, PACK_ALIGN) + directory + TAIL_NBYTES
        packs = [(digest_of(name)[:16], digest_of(name), nbytes, 0, 0, 0)] if self.frames else []
        units = sorted({row[0] for row in self.ranges}) if decisions is not None else []
        fields: dict[str, object] = {
            "rank": self.rank,
            "attempt": ATTEMPT,
            "skeleton": self.skeleton.digest,
            "host": f"host{self.rank // 2}",
            "ranges": np.array(self.ranges, RANGE),
            "chunks": np.array(self.chunks, CHUNK),
            "packs": np.array(packs, PACK),
            "frames": np.array(self.frames, FRAME),
            "checks": np.array(self.checks, CHECK),
            "decisions": decisions,
            "unit_decisions": np.array([(unit, 1, 0, 256 * 9, 0xFFFF, 0xFFFF, 0) for unit in units], UNIT_DECISION),
            "bytes_written": nbytes if self.frames else 0,
            "chunks_new": len(self.chunks),
            "chunks_delta": 0,
            "chunks_derived": 0,
            "chunks_planned": len(self.ranges),
            "warnings": (),
        }
        return Part(**{**fields, **changes})  # type: ignore[arg-type]


STATE = {"w": Entry((8, 16), is_shard=True), "step": Entry((3,)), "epoch": Entry(value=7)}


def sample_parts(world: int = 4) -> tuple[list[Part], dict[bytes, Skeleton]]:
    """Return the parts of ranks that each hold rows of ``w``; rank 0 writes ``step``, and all hold it."""
    skeleton = skeleton_of(STATE)
    makers = [PartMaker(rank, skeleton) for rank in range(world)]
    rows = [8 * rank // world for rank in range(world + 1)]
    for maker, lo, hi in zip(makers, rows, rows[1:], strict=False):
        if lo < hi:
            maker.write(0, 64 * lo, 64 * (hi - lo))
        maker.check(1, 0, 12, "step")
    makers[0].write(1, 0, 12, "step")
    record = DecisionsRecord(base="none", base_seq=None, keyframe_seq=None, reason="keyframe: the first checkpoint")
    return [maker.part(record) for maker in makers], {skeleton.digest: skeleton}


def sample_ranks_manifest() -> bytes:
    """Return the manifest of four ranks that uses everything that only checkpoints by many ranks have."""
    makers = []
    for rank in range(4):
        entries = {
            "w": Entry((8, 16), is_shard=True),
            "t": Entry((4, 6), is_shard=True, cuts=((), (2, 4))),
            "step": Entry((3,)),
            "rng": Entry((2,)),
            "differs": Entry((1,)),
            "epoch": Entry(value=rank // 2),
        }
        if rank == 3:
            entries["head"] = Entry((2, 2))
        maker = PartMaker(rank, skeleton_of(entries, per_rank=(("rng",),)))
        makers.append(maker)
        maker.write(0, 128 * rank, 128)
        if rank < 3:
            maker.write(1, 32 * rank, 32)
        if rank == 2:
            maker.write(2, 0, 12, "step")
        maker.check(2, 0, 12, "step")
        maker.write(3, 0, 8)
        content = "odd" if rank == 1 else "usual"
        maker.check(4, 0, 4, content)
        if rank < 2:
            maker.write(4, 0, 4, content)
        if rank == 3:
            maker.write(5, 0, 16, "head")
    record = DecisionsRecord(base="none", base_seq=None, keyframe_seq=None, reason="keyframe: the first checkpoint")
    parts = [maker.part(record, host=f"node{maker.rank // 2}") for maker in makers]
    merger = Merger(Limits())
    merged = merger.merge(merger.unite(parts, by_digest([maker.skeleton for maker in makers])), parts)
    facts = LogicalRecord(
        run="main",
        seq=4,
        step=42_000,
        time_ns=TIME_NS,
        parent=3,
        origin_id=None,
        is_archival=False,
        fidelity="exact",
        metrics={"loss": 2.0},
    )
    return merged.encode(facts, STORE_ID, limits=Limits())[1]


def by_digest(skeletons: Sequence[Skeleton]) -> dict[bytes, Skeleton]:
    """Return skeletons by their digests."""
    return {skeleton.digest: skeleton for skeleton in skeletons}
