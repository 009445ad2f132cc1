"""The part of a checkpoint by many ranks that belongs to one rank.

Values that differ between ranks are replaced by this rank's own. A rank that was not among the saved ones gets what a
policy says. Parts that only other ranks have, such as the layers of another pipeline stage, are left out; without a
live state, a rank of another world gets all of them, because nothing says whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckstore.errors import UsageError
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import World, per_rank_nodes, values_of, world_of
from ckstore.format.tree import (
    PER_RANK,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    TupleNode,
    format_path,
    is_bare_tensor,
    items_of,
    place_of,
)
from ckstore.state.markers import OnNewWorld, PerRank, Replicated
from ckstore.state.matching import listed
from ckstore.state.tensors import LeafAdapter
from ckstore.state.train_state import NamedOptimizer, TrainState

_ALONE_SIZE = 1


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of this process among the ranks of its job.

    Args:
        rank: Its number.
        world: Number of ranks.
        on_new_world: Which values a rank gets in another world, unless a ``PerRank`` mark says otherwise.
    """

    rank: int
    world: int
    on_new_world: OnNewWorld = "own"


def own_part(
    manifest: Manifest, plain: Manifest, place: RankPlace | None, into: object, adapters: Sequence[LeafAdapter]
) -> tuple[Manifest, list[str]]:
    """Return the part of a checkpoint that belongs to this rank, and warnings.

    Args:
        manifest: The checkpoint, as it is stored.
        plain: The selected part of its state.
        place: This process among its ranks; None: it is alone, and without ``into`` it gets the values of all ranks.
        into: The live state; None: there is none.
        adapters: Adapters of tensor libraries.

    Raises:
        UsageError: This rank was not among the saved ones, and no policy says which values it gets.
    """
    world = world_of(manifest.tree)
    if place is None and into is None:
        return plain, []
    place = place or RankPlace(0, _ALONE_SIZE)
    # A value of each rank that a user committed again is the same value in any world.
    if world is None:
        return plain, []
    partial = dict(world.partial)
    if not partial and next(per_rank_nodes(plain.tree), None) is None:
        return plain, []
    chooser = OwnValues(world, place, partial, adapters)
    tree = chooser.own(plain.tree, into, ())
    return replace(plain, tree=tree), chooser.warnings()


@dataclass(slots=True)
class OwnValues:
    """Walks over a tree and the live state in parallel.

    Args:
        world: Who saved the checkpoint.
        place: Who restores it.
        partial: The parts that only some ranks have, if this rank's part is to be chosen.
        adapters: Adapters of tensor libraries.
        leaves_missing: A value that this rank does not have, and for which there is no policy, stays as it is.
    """

    world: World
    place: RankPlace
    partial: Mapping[Path, tuple[int, ...]] = field(default_factory=dict)
    adapters: Sequence[LeafAdapter] = ()
    leaves_missing: bool = False
    chosen: list[Path] = field(default_factory=list)
    borrowed: list[Path] = field(default_factory=list)
    given: list[Path] = field(default_factory=list)
    """Parts that only some ranks had, and of which nothing says whether this one needs them."""
    omitted: list[Path] = field(default_factory=list)
    """Parts that only some ranks had, and the live state lacks."""

    def own(self, node: Node, live: Any, path: Path) -> Node:
        """Return this rank's part of a node."""
        policy = self.place.on_new_world
        while isinstance(live, PerRank | Replicated):
            policy = getattr(live, "on_new_world", None) or policy
            live = live.value
        if isinstance(node, ConvertedNode):
            if node.name == PER_RANK:
                values = values_of(node)
                is_left = self.leaves_missing and policy == "own" and self.place.rank not in values
                return node if is_left else self._own_value(values, policy, path)
            return replace(node, child=self.own(node.child, None, path))
        if isinstance(node, DictNode):
            return self._own_items(node, live, path)
        if isinstance(node, ListNode | TupleNode):
            items = live if isinstance(live, list | tuple) else ()
            children = [
                self.own(child, items[index] if index < len(items) else None, (*path, index))
                for index, child in enumerate(node.children)
            ]
            return node if _are_same(children, node.children) else replace(node, children=tuple(children))
        return node

    def _own_items(self, node: DictNode, live: Any, path: Path) -> DictNode:
        known = self._parts_of(live) if self.partial or not isinstance(live, dict) else live
        kept: list[tuple[Key, Node]] = []
        for key, child in items_of(node):
            here = (*path, key)
            is_live = None if known is None else key in known
            if here in self.partial and not self._takes(here, is_live):
                continue
            if is_live is False and not self._is_own(child):
                continue
            item = known.get(key) if known is not None else None
            kept.append((key, child if is_bare_tensor(child) else self.own(child, item, here)))
        children = tuple(child for _, child in kept)
        if len(kept) == len(node.children) and _are_same(children, node.children):
            return node
        return replace(node, keys=tuple(key for key, _ in kept), children=children)

    def _is_own(self, node: Node) -> bool:
        """Whether this rank was among those that had a value."""
        is_per_rank = isinstance(node, ConvertedNode) and node.name == PER_RANK
        return not is_per_rank or self.place.rank in values_of(node)  # type: ignore[arg-type]

    def _takes(self, path: Path, is_live: bool | None) -> bool:
        """Whether this rank gets a part that only some had; ``is_live`` is None if the live state is not known."""
        if is_live is None and self.place.world != self.world.size:
            self.given.append(path)
            return True
        is_taken = self.place.rank in self.partial[path] if is_live is None else is_live
        if not is_taken:
            self.omitted.append(path)
        return is_taken

    def _parts_of(self, live: Any) -> Mapping[Any, Any] | None:
        """Return the parts of a live object by key; None: they are not known."""
        if isinstance(live, dict):
            return live
        if isinstance(live, TrainState):
            return live.parts()
        is_named = isinstance(live, NamedOptimizer)
        item = live.optimizer if is_named else live
        for adapter in self.adapters:
            known = None if item is None else adapter.object_of(item)
            if known is not None:
                # An optimizer that has made no step yet has parameters, but no state.
                parts = known.parameters() or known.current_tensors()
                parts = live.named(parts) if is_named else dict(parts)
                if known.kind == "optimizer":
                    parts["param_groups"] = None
                return parts
        return None

    def _own_value(self, values: Mapping[int, Node], policy: OnNewWorld, path: Path) -> Node:
        rank, saved = self.place.rank, self.world.size
        # In another world, a function chooses for every rank.
        if rank in values and (policy in ("own", "nearest") or self.place.world == saved):
            self.chosen.append(path)
            return values[rank]
        if policy == "own":
            raise UsageError(
                f"the checkpoint has no value of rank {rank}: it was saved by {_ranks(saved)}, and this job has "
                f"{self.place.world}",
                where=place_of(path),
                todo="restore with as many ranks, mark the value with ckstore.PerRank(value, on_new_world='nearest'), "
                "or open the store with Ranks(..., per_rank='nearest'); a function of rank, world and saved world may "
                "choose, too",
                path=path,
            )
        if policy == "nearest":
            found = rank % saved
            found = found if found in values else sorted(values)[rank % len(values)]
        else:
            assert callable(policy)
            found = policy(rank, self.place.world, saved)
        if found not in values:
            raise UsageError(
                f"on_new_world chose rank {found!r}, of which the checkpoint has no value",
                where=place_of(path),
                todo=f"choose one of {listed([str(each) for each in sorted(values)])}",
                path=path,
            )
        (self.chosen if found == rank else self.borrowed).append(path)
        return values[found]

    def warnings(self, is_wanted: Callable[[Path], bool] = lambda path: True) -> list[str]:
        """Return what the user must know about values of each rank, and about parts that only some ranks had.

        Args:
            is_wanted: Whether the user must know about a value.
        """
        borrowed = [path for path in self.borrowed if is_wanted(path)]
        if self.place.world == self.world.size and not borrowed:
            return []
        chosen = [path for path in self.chosen if is_wanted(path)]
        found = []
        first = f"The checkpoint was saved by {_ranks(self.world.size)}, and this job has {self.place.world}"
        if chosen:
            found.append(f"{first}: rank {self.place.rank} got its own values of {_named(chosen)}.")
        if borrowed:
            found.append(f"{first}: rank {self.place.rank} got another rank's values of {_named(borrowed)}.")
        if self.given:
            found.append(f"{first}: rank {self.place.rank} got {_named(self.given)}, which only some of them had.")
        # Of several ranks, others take them.
        if self.omitted and self.place.world == _ALONE_SIZE:
            found.append(f"{first}: {_named(self.omitted)} was left out, because the state that was passed lacks it.")
        return found


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _named(paths: Iterable[Path]) -> str:
    return listed([format_path(path) or "the state" for path in paths])


def _are_same(made: Sequence[Node], nodes: Sequence[Node]) -> bool:
    return all(one is other for one, other in zip(made, nodes, strict=True))
