"""What the ranks do in one commit, without saying when: ``protocol.py`` decides the order.

``RankWork`` is one rank's work for a captured state: it says what it holds, writes its share, and makes its part.
``Root`` is rank 0's work for all: it plans who writes what, merges the parts, and publishes the manifest.

Invariants:
- A rank's packs are durable before it sends its part.
- The manifest is published only by ``Root.publish``, and names the packs of all ranks.
- A rank removes what it wrote only if rank 0 has said that nothing was published.
"""

from __future__ import annotations

import logging
import socket
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckstore.commit.commit import CommitRequest, decisions_of, refresh_bases, write_unpublished
from ckstore.commit.pipeline import WriteBlocks
from ckstore.commit.unpublished import Unpublished, remove_packs
from ckstore.concurrency import ThreadLimit, collector_paused, noop
from ckstore.config import Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import CkstoreError, MalformedError, UsageError
from ckstore.format.manifest import Manifest, build_manifest
from ckstore.format.records import decode_inner, encode_inner
from ckstore.format.tree import ListNode, Path, place_of
from ckstore.hashing import digest_of
from ckstore.ranks.arrays import Held, RankState
from ckstore.ranks.merge import Merged, Merger
from ckstore.ranks.part import Part, Skeleton, make_part
from ckstore.ranks.planning import Holdings, RankContent, decode_spans, plan_ranks, spans_by_rank
from ckstore.ranks.publishing import Entry, Publisher
from ckstore.ranks.replicas import Comparison, Difference, compare
from ckstore.ranks.skeletons import SkeletonDecoder
from ckstore.ranks.writing import Share, checks_of_owned, checks_of_rest, part_of
from ckstore.results import Receipt, Stopwatch
from ckstore.store.chunk_index import locate
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")

MAY_BE_VISIBLE = "may_be_visible"
"""Fact of an error: the manifest may be in the store, so packs must stay."""

MoreRanges = tuple[tuple[int, int, int], ...]
"""What a rank must write in addition to its share: unit, offset and length of each range."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """The commit of one rank.

    Args:
        state: What the rank holds.
        step: The trainer's step.
        policy: How to store it.
        parent: The seq that training continued from.
        metrics: Numbers to find the checkpoint by. Those of rank 0 count.
        source_is_immutable: Nothing changes the state's memory until the commit ends, because it is in an arena.
        retained_slot: The ticket of the arena's slot, if its memory stays unchanged for as long as bases use it.
        time_ns: When the state was made; None for now. That of rank 0 counts.
        watch: Receives the duration of each stage; None: a new one.
    """

    state: RankState
    step: int
    policy: Policy
    parent: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    source_is_immutable: bool = False
    retained_slot: int | None = None
    time_ns: int | None = None
    watch: Stopwatch | None = None


@dataclass(slots=True)
class RankTools:
    """What one rank keeps from one commit for the next.

    Args:
        repository: The open run.
        rank: The rank.
        bases: Chunks of the previous checkpoint.
        thread_limit: How many threads may hash and code.
        blocks: Source of the blocks that packs are written through.
    """

    repository: Repository
    rank: int
    bases: BaseCache = field(default_factory=BaseCache)
    thread_limit: ThreadLimit = field(default_factory=ThreadLimit)
    blocks: WriteBlocks = field(default_factory=WriteBlocks)


class RankWork:
    """One rank's work for one commit.

    Args:
        tools: What the rank keeps.
        request: What to commit.
        attempt: Id of the attempt.
        check: Called before each chunk. What it raises ends the work.
    """

    def __init__(
        self, tools: RankTools, request: RankRequest, attempt: bytes, *, check: Callable[[], None] = noop
    ) -> None:
        if request.policy.residual is not None:
            raise UsageError(
                "many ranks cannot quantize a checkpoint",
                where=f"policy with residual={request.policy.residual.name!r}",
                todo="commit with an exact policy, and quantize old checkpoints with `ckstore demote`",
            )
        self._tools, self._request, self._attempt, self._check = tools, request, attempt, check
        self._watch = request.watch or Stopwatch(tools.repository.clock)
        self._skeleton = Skeleton.of(request.state)
        # Without the number of the rank, so that ranks with equal states send equal bytes.
        self._encoded_skeleton = self._skeleton.encode()
        self._holdings = request.state.captured.structure.once("holdings", lambda: Holdings.of(request.state))
        self._written: list[Unpublished] = []
        self._share: Share | None = None
        self._part: Part | None = None

    @property
    def watch(self) -> Stopwatch:
        """Receives the duration of each stage."""
        return self._watch

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """The digests of the encoded skeleton and holdings."""
        return digest_of(self._encoded_skeleton), self._holdings.digest

    @property
    def share_nbytes(self) -> int | None:
        """Bytes of the state that this rank writes. None: ``write`` was not called."""
        return None if self._share is None else sum(held.nbytes for held in self._share.owned)

    def content(self, digest: bytes) -> bytes:
        """Return what one of the digests stands for."""
        return self._holdings.encoded if digest == self._holdings.digest else self._encoded_skeleton

    def write(self, spans: bytes) -> bytes:
        """Write this rank's share. Its packs are durable when this returns its part.

        Raises:
            CapacityError: The disk is full.
            BackendError: The storage failed twice.
        """
        tools, request = self._tools, self._request
        state = request.state
        share = state.captured.structure.once(("share", spans), lambda: Share.of(state, decode_spans(spans)))
        self._share = share
        tools.repository.prepare_run()
        tools.bases.begin(request.policy.base_cache_nbytes_max if request.policy.base_cache == "memory" else 0)
        refresh_bases(tools.repository, tools.bases)
        unpublished = self._store(share)
        limits = tools.repository.limits
        with self._watch("check"):
            checks = list(checks_of_owned(state, share, unpublished.plan, unpublished.stored, limits))
            for check in checks_of_rest(state, share.rest, limits, turn=int.from_bytes(self._attempt[:4], "little")):
                checks.append(check)
                self._check()
        self._part = self._made_part(unpublished, share, checks, state.captured.warnings)
        return self._part.encode()

    def write_more(self, more: MoreRanges) -> bytes:
        """Write ranges of units that turned out to differ between ranks. Return the whole part.

        Raises:
            MalformedError: This rank does not hold such a range.
        """
        state = self._request.state
        ranges: list[Held] = []
        for unit, offset, nbytes in more:
            # They are sorted by unit and offset.
            at = bisect_right(state.held, (unit, offset), key=lambda held: (held.unit, held.offset))
            held = state.held[at - 1] if at else None
            if held is None or held.unit != unit or not offset < offset + nbytes <= held.offset + held.nbytes:
                raise MalformedError(f"rank 0 asks for bytes of unit {unit} that this rank does not hold")
            ranges.append(part_of(held, offset, offset + nbytes))
        assert self._part is not None, "write comes first"
        share = Share.of_ranges(state, ranges)
        unpublished = self._store(share)
        self._part = self._part.joined(self._made_part(unpublished, share, [], []))
        return self._part.encode()

    def _store(self, share: Share) -> Unpublished:
        tools, request = self._tools, self._request
        commit = CommitRequest(
            captured=share.captured(request.state),
            step=request.step,
            policy=request.policy,
            parent=request.parent,
            metrics={},
            bases=tools.bases,
            source_is_immutable=request.source_is_immutable,
            retained_slot=request.retained_slot,
            thread_limit=tools.thread_limit,
            blocks=tools.blocks,
            check=self._check,
        )
        self._written.append(write_unpublished(tools.repository, commit, self._watch))
        return self._written[-1]

    def _made_part(
        self,
        unpublished: Unpublished,
        share: Share,
        checks: Sequence[tuple[int, int, int, bytes]],
        warnings: Sequence[str],
    ) -> Part:
        return make_part(
            unpublished,
            share.places,
            checks,
            rank=self._tools.rank,
            attempt=self._attempt,
            skeleton=self._skeleton.digest,
            host=socket.gethostname(),
            warnings=warnings,
        )

    def finish(self, receipt: Receipt) -> None:
        """Make what this rank wrote the base of its next commit: the checkpoint is durable."""
        tools, unpublished, share = self._tools, self._written[0], self._share
        assert share is not None, "write comes first"
        manifest = self._own_manifest(unpublished, receipt)
        paths = share.structure.once("paths", dict[int, Path])
        chunk_ids = [frame.frame.chunk_id for frame in unpublished.stored.frames]
        starts = unpublished.plan.starts
        unpublished.selection.remember(tools.bases, manifest, chunk_ids, paths, starts)
        tools.bases.keep_only_slot(self._request.retained_slot)
        tools.repository.note_committed(manifest)
        tools.repository.note_seq(receipt.seq)

    def _own_manifest(self, unpublished: Unpublished, receipt: Receipt) -> Manifest:
        """Return the manifest of this rank's share alone. It is never stored."""
        repository, plan, stored = self._tools.repository, unpublished.plan, unpublished.stored
        packs, frames = locate(stored.frames)
        with collector_paused():
            return build_manifest(
                store_id=repository.store_id,
                run=repository.run,
                seq=receipt.seq,
                step=receipt.step,
                time_ns=0,
                parent=None,
                tree=ListNode(()),
                tensors=(),
                storages=plan.storages,
                chunks=unpublished.chunk_specs(),
                packs=packs,
                frames=frames,
                bytes_written=stored.nbytes_written,
                chunks_new=stored.chunks_new,
                decisions=decisions_of(unpublished),
            )

    def fail(self, *, is_unpublished: bool) -> None:
        """Forget the commit; ``is_unpublished`` if nothing was published for certain, so that its packs can go."""
        self._tools.bases.discard_drafts()
        if not is_unpublished:
            return
        try:
            for unpublished in self._written:
                remove_packs(self._tools.repository, unpublished.stored.pack_names)
        except (CkstoreError, OSError) as failure:
            _log.warning("packs of an unpublished checkpoint are left for `ckstore gc` to remove: %s", failure)


class RankContents:
    """What the ranks sent about their states, by digest: that of the last commit, which they do not send again.

    It belongs to the connection between the ranks, and not to a handle.
    """

    def __init__(self) -> None:
        self._decoder = SkeletonDecoder()
        self._skeletons: dict[bytes, Skeleton] = {}
        self._holdings: dict[bytes, Holdings] = {}

    def update(self, digests: Sequence[Sequence[bytes]], contents: Mapping[bytes, bytes]) -> list[RankContent]:
        """Return what each rank holds, and keep only that.

        Args:
            digests: For each rank the digests of its skeleton and its holdings.
            contents: What the digests stand for that are new.
        """
        self._decoder.begin()
        for rank, (skeleton, holdings) in enumerate(digests):
            where = f"rank {rank}"
            if skeleton in contents and skeleton not in self._skeletons:
                self._skeletons[skeleton] = self._decoder.decode(contents[skeleton], where=where)
            if holdings in contents and holdings not in self._holdings:
                self._holdings[holdings] = Holdings.decode(contents[holdings], where=where)
        found = [RankContent(self._skeletons[skeleton], self._holdings[holdings]) for skeleton, holdings in digests]
        self._skeletons = {digest: self._skeletons[digest] for digest, _ in digests}
        self._holdings = {digest: self._holdings[digest] for _, digest in digests}
        return found


class Root:
    """Rank 0's work for the commits of all ranks, one after another.

    Args:
        repository: The open run.
        contents: What rank 0 knows of the ranks.
        on_divergence: What to do if replicas of a tensor differ: ``"warn"`` or ``"raise"``.
    """

    def __init__(self, repository: Repository, contents: RankContents, *, on_divergence: str = "warn") -> None:
        self._repository = repository
        self._contents = contents
        self._on_divergence = on_divergence
        self._merger = Merger(repository.limits)
        self._skeletons: dict[bytes, Skeleton] = {}
        self._planned: tuple[tuple[object, ...], list[bytes]] | None = None
        self._differing: dict[Path, frozenset[int]] = {}
        """Plain units that differed between ranks in the last commit, and the ranks that warnings have named."""
        self._comparison: Comparison | None = None
        self._merged: Merged | None = None
        self._parts: dict[int, Part] = {}
        self._publisher = Publisher(repository)

    def plan(self, digests: Sequence[Sequence[bytes]], contents: Mapping[bytes, bytes]) -> list[bytes]:
        """Return for each rank which bytes it writes, of those that others hold, too.

        Args:
            digests: For each rank the digests of its skeleton and its holdings.
            contents: What the digests stand for that are new.
        """
        self._comparison = self._merged = None
        self._parts = {}
        self._publisher.begin()
        known = self._contents.update(digests, contents)
        self._skeletons = {skeleton: content.skeleton for (skeleton, _), content in zip(digests, known, strict=True)}
        # Skeletons with other plain values lead to the same plan.
        key: tuple[object, ...] = (
            tuple(
                (content.skeleton.tables_digest, digest) for content, (_, digest) in zip(known, digests, strict=True)
            ),
            frozenset(self._differing),
        )
        if self._planned is None or self._planned[0] != key:
            plan = plan_ranks(known, self._repository.limits, frozenset(self._differing))
            self._planned = key, spans_by_rank(plan)
        return self._planned[1]

    def merge(self, parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Merge the parts of all ranks. Return what ranks must write before that can succeed; empty: it did.

        Args:
            parts: The new parts by rank: at first those of all ranks, later those of ranks that wrote more.

        Raises:
            MalformedError: A part is damaged, or contradicts itself.
            UsageError: The ranks do not hold the whole state, or replicas differ and ``on_divergence`` is ``"raise"``.
        """
        self._parts |= {rank: Part.decode(part, where=f"rank {rank}") for rank, part in parts.items()}
        decoded = [self._parts[rank] for rank in sorted(self._parts)]
        with collector_paused():
            skeletons = {skeleton.digest: skeleton for skeleton in self._skeletons.values()}
            union = self._merger.unite(decoded, skeletons)
            if self._comparison is None:
                found = compare(union, decoded)
                _refuse_different_meshes(found, [skeletons[part.skeleton] for part in decoded])
                self._comparison = self._with_news(found)
                if self._comparison.more:
                    return {rank: encode_inner(ranges) for rank, ranges in self._comparison.more.items()}
            self._merged = self._merger.merge(union, decoded, self._comparison)
        # Those of thousands of ranks take hundreds of megabytes.
        self._parts = {}
        return {}

    def _with_news(self, found: Comparison) -> Comparison:
        """Return a comparison without the differences of plain units that warnings have named; remember the others."""
        if found.differences and self._on_divergence == "raise":
            # Shards first: a plain value may be meant to differ.
            first = min(found.differences, key=lambda each: not each.is_shard)
            todo = "find the rank with faulty memory or other arithmetic; restore the newest checkpoint on all ranks"
            raise UsageError(
                f"replicas of the state differ: {first.what}",
                where=place_of(first.path),
                todo=todo if first.is_shard else f"mark it with ckstore.PerRank if that is intended; else {todo}",
                paths=[each.path for each in found.differences],
                ranks=first.ranks,
            )
        news: list[Difference] = []
        known, self._differing = self._differing, {}
        for each in found.differences:
            named = known.get(each.path, frozenset())
            # A shard may have other bytes that differ than before.
            if each.is_shard or not named.issuperset(each.ranks):
                news.append(each)
            if not each.is_shard:
                # As long as they differ, each rank writes its own value without being asked.
                self._differing[each.path] = self._differing.get(each.path, named).union(each.ranks)
        return replace(found, differences=tuple(news))

    def may_be_visible(self, error: BaseException) -> bool:
        """Return True unless the manifest of a failed commit is certainly not in place. Then packs must stay."""
        return self._publisher.may_be_visible(error)

    def publish(self, request: RankRequest, watch: Stopwatch) -> bytes:
        """Publish what was merged. Return the encoded receipt.

        Raises:
            ConflictError: Another writer has the run, or packs vanished during the commit.
        """
        merged, self._merged = self._merged, None
        assert merged is not None, "merge comes first"
        entry = Entry(request.step, request.parent, request.metrics, request.time_ns)
        return encode_receipt(self._publisher.publish(merged, entry, watch))


def _refuse_different_meshes(found: Comparison, skeletons: Sequence[Skeleton]) -> None:
    """Refuse a tensor all of whose bytes differ on another device mesh: it is another tensor with the same path.

    Raises:
        UsageError: There is one.
    """
    for each in found.differences:
        meshes: dict[tuple[int, ...], None] = {}
        for skeleton in skeletons if each.is_shard and each.is_whole else ():
            for unit in skeleton.units:
                if unit.path == each.path and unit.array is not None:
                    meshes.setdefault(skeleton.layouts[unit.array.layout].mesh_ranks)
        if len(meshes) > 1:
            first, second, *_ = meshes
            raise UsageError(
                f"ranks {list(first)} and ranks {list(second)} have different tensors under the same path",
                where=place_of(each.path),
                todo="give the parts of each pipeline stage keys of their own, such as the numbers of the layers",
                path=each.path,
            )


def encode_receipt(receipt: Receipt) -> bytes:
    """Return a receipt as rank 0 sends it."""
    return encode_inner(receipt)


def decode_receipt(content: bytes) -> Receipt:
    """Return the receipt that rank 0 has sent."""
    return decode_inner(content, Receipt, where="a receipt of rank 0")


def decode_more(content: bytes) -> MoreRanges:
    """Return the ranges that rank 0 asks for."""
    return decode_inner(content, MoreRanges, where="a request of rank 0")
