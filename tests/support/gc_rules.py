"""The rules of ckstore's deletions, as two models that a search can walk through; see gc_model.py.

Model 1, packs: may garbage collection take a pack that a commit is about to use?
    One chunk is in one pack, and at the start no manifest references that pack. This is the
    dangerous moment: writers want to use the chunk, collectors want to remove the pack. (A pack that
    a writer has just filled and not yet published is in the same position.)

    A writer picks the pack, publishes a manifest that references it, verifies that the pack is still
    in place (renaming it back from the trash if it is not), and only then acknowledges. Afterwards
    retention may drop the manifest.

    A collector lists manifests, lists them again, renames the pack into the trash, lists manifests
    again, and unlinks it from there. A collector that finds a pack left in the trash by a crashed one
    takes it over. Nobody waits for anybody: there are no leases, no lists, no clocks.

    A writer dies anywhere; a collector crashes anywhere and starts again.

    An undelete is a writer that may pick the pack in the trash: it publishes and verifies like any other.

    The property: a pack that an acknowledged, retained manifest references is never purged.

Model 2, generations: may replacing a manifest lose a checkpoint, or bring back a dropped one?
    One checkpoint, at the start with generation 0 of its manifest. A manifest file is never
    overwritten. A replacer (repack, demote, push, pull) reads the highest generation, publishes the
    next one unless that name is taken, looks for the drop mark, and then either withdraws what it
    published or moves the lower generations to the trash. A dropper makes the mark, and then lists and
    moves until nothing is left. A collector lists, and moves all generations but the highest.

    A replacer dies anywhere.

    The property: as long as nobody drops the checkpoint, one generation is in place; once it is
    dropped and everyone has ended, none is.

Limits
    Model 1: one pack, one chunk, at most two writers and two collectors, one crash per collector, four
    trash names. Model 2: one checkpoint, two replacers that replace once each, one dropper, one
    collector; a dropper or collector that dies is not modelled, nor packs, nor a drop taken back.
    Listing and renaming are taken as linearizable (true on a local file system). Power loss is not
    modelled: it is covered by acknowledging only after the fsyncs. Neither are tags. Object stores, which have
    no atomic rename, have a model of their own: gc_bucket_rules.py; so has rewriting in a tier: gc_tier_rules.py.
    Safety only: it does not show that garbage is collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol

TRASH_NAMES_MAX = 4


class State(Protocol):
    """A state of either model: hashable, and able to tell whether it breaks the property."""

    @property
    def is_violation(self) -> bool: ...


Move = tuple[str, Any]  # a label for the trace, and the state it leads to


class Rules(Protocol):
    """A protocol, and what can be left out of it."""

    def start(self) -> State: ...

    def moves(self, state: Any) -> Iterator[Move]: ...


IN_PLACE = "in place"
PURGED = "purged"
WRITER_ENDED = {"acked", "dead", "withdrawn", "writes it again"}


class TrashNames(Enum):
    """How a collector names the trash folder it moves a pack into."""

    FRESH = "fresh"  # random for every run: never seen before
    REUSED = "reused"  # one per collector, the same again after a crash
    SHARED = "shared"  # one for all collectors


class Writer(NamedTuple):
    at: str = "choose"
    has_manifest: bool = False  # a published manifest of this writer references the pack
    is_acked: bool = False


class Collector(NamedTuple):
    at: str
    crashes_left: int
    trash_name: int


class PackState(NamedTuple):
    pack: str | int  # IN_PLACE, PURGED, or the name of its trash folder
    trash_names_used: int
    writers: tuple[Writer, ...]
    collectors: tuple[Collector, ...]

    @property
    def is_referenced(self) -> bool:
        return any(writer.has_manifest for writer in self.writers)

    @property
    def is_in_trash(self) -> bool:
        return isinstance(self.pack, int)

    @property
    def is_violation(self) -> bool:
        return self.pack == PURGED and any(w.is_acked and w.has_manifest for w in self.writers)


class PackRules(NamedTuple):
    """How packs are used and collected."""

    writers: int = 2
    collectors: int = 1
    verifies_after_publish: bool = True
    rescues_from_trash: bool = True
    has_trash: bool = True
    rechecks_before_trash: bool = True
    rechecks_before_purge: bool = True
    trash_names: TrashNames = TrashNames.FRESH
    undeletes: bool = False

    def start(self) -> PackState:
        collectors = tuple(Collector("list", 1, j) for j in range(self.collectors))
        return PackState(IN_PLACE, 0, (Writer(),) * self.writers, collectors)

    def moves(self, state: PackState) -> Iterator[Move]:
        for i in range(self.writers):
            yield from writer_moves(state, i, self)
        for j in range(self.collectors):
            yield from collector_moves(state, j, self)


def writer_moves(state: PackState, i: int, rules: PackRules) -> Iterator[Move]:
    """Everything writer `i` can do next, its death included."""
    me = state.writers[i]

    def to(at: str, *, pack: str | int = state.pack, label: str = "", **changes: bool) -> Move:
        writers = list(state.writers)
        writers[i] = me._replace(at=at, **changes)
        return f"writer {i}: {label or 'now at: ' + at}", state._replace(pack=pack, writers=tuple(writers))

    if me.at not in WRITER_ENDED:
        yield to("dead", label="dies")
    match me.at:
        case "choose":
            is_found = state.pack == IN_PLACE or (rules.undeletes and state.is_in_trash)
            yield to("publish" if is_found else "writes it again")
        case "publish":
            yield to("verify", has_manifest=True)
        case "verify":
            if not rules.verifies_after_publish or state.pack == IN_PLACE:
                yield to("acked", is_acked=True)
            elif state.is_in_trash and rules.rescues_from_trash:
                yield to("acked", pack=IN_PLACE, is_acked=True)
            else:
                yield to("withdrawn", has_manifest=False)
        case "acked" if me.has_manifest:
            yield to("acked", label="retention drops its manifest", has_manifest=False)


def collector_moves(state: PackState, j: int, rules: PackRules) -> Iterator[Move]:
    """Everything collector `j` can do next, a crash and restart included."""
    me = state.collectors[j]

    def to(at: str, *, trash_name: int = me.trash_name, **changes: object) -> Move:
        collectors = list(state.collectors)
        collectors[j] = me._replace(at=at, trash_name=trash_name)
        return f"collector {j}: now at: {at}", state._replace(collectors=tuple(collectors), **changes)

    def restarted() -> Move:
        collectors = list(state.collectors)
        collectors[j] = me._replace(at="list", crashes_left=me.crashes_left - 1)
        return f"collector {j}: crashes, starts again", state._replace(collectors=tuple(collectors))

    def back_in_place() -> Move:
        return to("list", pack=IN_PLACE if state.is_in_trash else state.pack)

    if me.crashes_left and me.at != "list":
        yield restarted()
    match me.at:
        case "list":
            if state.is_referenced:
                if state.is_in_trash:
                    yield back_in_place()
            elif state.pack == IN_PLACE:
                yield to("list before trash")
            elif state.is_in_trash:  # left behind by a crashed collector
                yield to("list before purge", trash_name=state.pack)
        case "list before trash":
            if rules.rechecks_before_trash and state.is_referenced:
                yield to("list")
            else:
                yield to("move to trash")
        case "move to trash":
            yield from trash_moves(state, me, rules, to)
        case "list before purge":
            if rules.rechecks_before_purge and state.is_referenced:
                yield back_in_place()
            else:
                yield to("purge")
        case "purge":
            is_mine = state.pack == me.trash_name or rules.trash_names is TrashNames.SHARED
            yield to("list", pack=PURGED if state.is_in_trash and is_mine else state.pack)


def trash_moves(state: PackState, me: Collector, rules: PackRules, to: Callable[..., Move]) -> Iterator[Move]:
    """The rename into the trash, or what a protocol without trash does instead."""
    if not rules.has_trash:
        yield to("list", pack=PURGED if state.pack == IN_PLACE else state.pack)
    elif state.pack != IN_PLACE:
        yield to("list")
    elif rules.trash_names is not TrashNames.FRESH:
        yield to("list before purge", pack=me.trash_name)
    elif state.trash_names_used < TRASH_NAMES_MAX:
        name = state.trash_names_used
        yield to("list before purge", pack=name, trash_name=name, trash_names_used=name + 1)


class Replacer(NamedTuple):
    at: str = "read"
    base: int = 0  # the generation it has read; it publishes the one after it


class Mover(NamedTuple):
    """A dropper or a collector: it lists generations, then moves those it has listed."""

    at: str
    listed: frozenset[int] = frozenset()


class ManifestState(NamedTuple):
    in_place: frozenset[int]
    is_marked: bool
    replacers: tuple[Replacer, ...]
    dropper: Mover
    collector: Mover

    @property
    def is_violation(self) -> bool:
        is_lost = not self.is_marked and not self.in_place
        has_ended = self.dropper.at == "ended" and self.collector.at == "list"
        has_ended = has_ended and all(replacer.at == "ended" for replacer in self.replacers)
        return is_lost or (has_ended and bool(self.in_place))


class ReplaceRules(NamedTuple):
    """How a manifest is replaced and dropped."""

    replacers: int = 2
    looks_for_mark: bool = True  # False: it looks whether the generation it replaces is still there

    def start(self) -> ManifestState:
        return ManifestState(frozenset({0}), False, (Replacer(),) * self.replacers, Mover("mark"), Mover("list"))

    def moves(self, state: ManifestState) -> Iterator[Move]:
        for i in range(self.replacers):
            yield from replacer_moves(state, i, self)
        yield from dropper_moves(state)
        yield from superseded_moves(state)


def replacer_moves(state: ManifestState, i: int, rules: ReplaceRules) -> Iterator[Move]:
    """Everything replacer `i` can do next, its death included."""
    me = state.replacers[i]
    target = me.base + 1

    def to(at: str, *, base: int = me.base, in_place: frozenset[int] = state.in_place) -> Move:
        replacers = list(state.replacers)
        replacers[i] = Replacer(at, base)
        return f"replacer {i}: now at: {at}", state._replace(in_place=in_place, replacers=tuple(replacers))

    if me.at not in {"ended", "dead"}:
        yield to("dead")
    match me.at:
        case "read":
            yield to("publish", base=max(state.in_place)) if state.in_place else to("ended")
        case "publish":
            if target in state.in_place:  # somebody else has replaced it
                yield to("ended")
            else:
                yield to("look", in_place=state.in_place | {target})
        case "look":
            is_dropped = state.is_marked if rules.looks_for_mark else me.base not in state.in_place
            yield to("withdraw" if is_dropped else "move lower")
        case "withdraw":
            yield to("ended", in_place=state.in_place - {target})
        case "move lower":
            yield to("ended", in_place=frozenset(g for g in state.in_place if g > me.base))


def dropper_moves(state: ManifestState) -> Iterator[Move]:
    """Mark, then list and move until no generation is left."""

    def to(at: str, listed: frozenset[int] = frozenset(), **changes: object) -> Move:
        return f"dropper: now at: {at}", state._replace(dropper=Mover(at, listed), **changes)

    match state.dropper.at:
        case "mark":
            yield to("list", is_marked=True)
        case "list":
            yield to("move", state.in_place) if state.in_place else to("ended")
        case "move":
            yield to("list", in_place=state.in_place - state.dropper.listed)


def superseded_moves(state: ManifestState) -> Iterator[Move]:
    """What a collector does with generations: it moves all but the highest, again and again."""
    if state.collector.at == "move":
        in_place = state.in_place - state.collector.listed
        yield "collector: has moved", state._replace(in_place=in_place, collector=Mover("list"))
    elif len(state.in_place) > 1:
        superseded = state.in_place - {max(state.in_place)}
        yield "collector: has listed", state._replace(collector=Mover("move", superseded))
