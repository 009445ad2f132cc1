"""The rules by which a pack in a tier is rewritten; a model for gc_model.py.

One checkpoint that was pushed: its manifest here names the pack ``a`` in the tier, and a copy of an earlier generation
of it lies there. Part of the pack is needed by nobody, so that a collector rewrites it; what it writes is ``b``, and
``c`` or ``d`` when it starts again. Meanwhile somebody pulls the checkpoint and pushes it again.

A rewriter checks both sides, copies what is needed to a new pack, publishes the next generation here unless another
has, sees the pack, and withdraws if it is gone, or else moves the lower generations to the trash. Then it looks again,
and puts there what is here *now*, as the next generation of what is there, if the copy there names another pack. It
dies anywhere and starts again. A cleaner removes copies there that have a whole one above them, and packs that no
manifest names: none here, in the trash here, or there. A collector here moves the generations below a whole one to the
trash, and the trash is emptied at any time.

A pull brings the pack here and publishes the next generation. A push puts the pack there unless it is there, puts the
manifest there under the number that it has here, publishes the next one here, and sees to it as a rewriter does. Where
the number is taken there it publishes the same here above all numbers there, and starts again. Once the manifest here
is lost, and the one before it is brought back from the trash.

The property: here is a whole generation; what the trash here names is there; the tier, opened by itself, has a whole
copy; and no push ever meets another manifest under a name that it puts: that would end in an error for ever.

Limits: one checkpoint, one pack of it at a time, one rewriter that starts again twice, two pulls or pushes. Nobody
drops the checkpoint: that is model 2. Checking all manifests and removing is one step here: that is gc_bucket_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from support.gc_rules import Move

NEW_PACKS = "dcb"
"""By turns that are left: ids are never used twice."""


class Manifest(NamedTuple):
    """A manifest: its generation, its pack, and whether that lies here."""

    generation: int
    pack: str
    is_local: bool = False


class Actor(NamedTuple):
    at: str = "look"
    seen: Manifest = Manifest(0, "")
    pack: str = ""
    turns_left: int = 2


class TierState(NamedTuple):
    here: frozenset[Manifest]
    trash: frozenset[Manifest]  # manifests in the trash here
    copies: frozenset[Manifest]
    packs: frozenset[str]  # in the tier
    rewriter: Actor
    mover: Actor
    has_conflict: bool = False
    was_set_back: bool = False

    @property
    def home(self) -> Manifest:
        return max(self.here)

    @property
    def highest(self) -> Manifest:
        return max(self.copies)

    def is_whole(self, form: Manifest) -> bool:
        return form.is_local or form.pack in self.packs

    @property
    def is_violation(self) -> bool:
        is_lost = not any(map(self.is_whole, self.here)) or not any(map(self.is_whole, self.copies))
        return self.has_conflict or is_lost or not all(map(self.is_whole, self.trash))


class TierRules(NamedTuple):
    """How a pack in a tier is rewritten, and what can be left out of it."""

    steps_over: bool = True  # False: a push does not take another number where its own is taken
    looks_after: bool = True  # False: the rewriter does not see to its pack after it has published
    cleans_by_copies: bool = True  # False: what only a copy there names is removed
    cleans_by_trash: bool = True  # False: what only the trash here names is removed

    def start(self) -> TierState:
        here, copies, packs = frozenset({Manifest(1, "a")}), frozenset({Manifest(0, "a")}), frozenset("a")
        return TierState(here, frozenset({Manifest(0, "a", is_local=True)}), copies, packs, Actor(), Actor())

    def moves(self, state: TierState) -> Iterator[Move]:
        yield from rewriter_moves(state, self)
        yield from mover_moves(state, self)
        yield "the trash is emptied", state._replace(trash=frozenset())
        if state.is_whole(state.home):
            yield "lower generations go", with_lower_moved(state, state.home)
        yield "cleaner", cleaned(state, self)
        earlier = [form for form in state.trash if form.generation < state.home.generation]
        if earlier and not state.was_set_back:
            last = max(earlier)
            after = state._replace(here=frozenset({last}), trash=state.trash - {last}, was_set_back=True)
            yield "what is here is lost, and what was before it brought back", after


def put(state: TierState, form: Manifest) -> TierState:
    """Put a manifest there, create-only: where the name is taken, nothing comes of it."""
    is_taken = form.generation in {copy.generation for copy in state.copies}
    return state if is_taken else state._replace(copies=state.copies | {Manifest(form.generation, form.pack)})


def with_lower_moved(state: TierState, form: Manifest) -> TierState:
    """Move what lies below a generation here to the trash, where it names its pack."""
    if form not in state.here:
        return state
    lower = {each for each in state.here if each.generation < form.generation}
    return state._replace(here=state.here - lower, trash=state.trash | lower)


def settled(state: TierState, form: Manifest) -> TierState:
    """See the pack of what was published, and withdraw it, or let it take the place of what is below."""
    if form not in state.here or state.is_whole(form):
        return with_lower_moved(state, form)
    return state._replace(here=state.here - {form}) if len(state.here) > 1 else state


def rewriter_moves(state: TierState, rules: TierRules) -> Iterator[Move]:
    """Everything the rewriter can do next; that it dies is that it starts again."""
    me, home = state.rewriter, state.home

    def to(at: str, after: TierState = state, **changes: object) -> Move:
        return f"rewriter: now at: {at}", after._replace(rewriter=me._replace(at=at, **changes))

    if me.at != "look" and me.turns_left:
        yield "rewriter: starts again", state._replace(rewriter=Actor(turns_left=me.turns_left - 1))
    match me.at:
        case "look":
            follows = not home.is_local and state.highest.generation <= home.generation
            if follows and len(state.here) == 1:
                yield to("copy", seen=home, pack=NEW_PACKS[me.turns_left])
            yield to("check copies")
        case "copy":
            yield to("publish", state._replace(packs=state.packs | {me.pack}))
        case "publish":
            target = Manifest(me.seen.generation + 1, me.pack)
            if home == me.seen:
                yield to("see", state._replace(here=state.here | {target}), seen=target)
            else:
                yield to("check copies")
        case "see":
            see = settled if rules.looks_after else with_lower_moved
            yield to("check copies", see(state, me.seen))
        case "check copies":
            follows = not home.is_local and state.highest.generation <= home.generation
            if follows and state.highest.pack != home.pack and home.pack in state.packs:
                yield to("put", seen=Manifest(state.highest.generation + 1, home.pack))
        case "put":
            yield to("ended", put(state, me.seen))


def mover_moves(state: TierState, rules: TierRules) -> Iterator[Move]:
    """Pull, or push, whatever is due."""
    me, home = state.mover, state.home

    def to(at: str, after: TierState = state, **changes: object) -> Move:
        return f"mover: now at: {at}", after._replace(mover=me._replace(at=at, **changes))

    def ended(after: TierState) -> Move:
        return "mover: has ended", after._replace(mover=Actor(turns_left=me.turns_left - 1))

    if me.turns_left == 0:
        return
    match me.at:
        case "look" if not home.is_local and home.pack in state.packs:
            yield to("publish", seen=home)
        case "look" if home.is_local:
            yield to("put pack", seen=home)
        case "put pack":
            yield to("put manifest", state._replace(packs=state.packs | {me.seen.pack}))
        case "put manifest":
            taken = {copy.pack for copy in state.copies if copy.generation == me.seen.generation}
            if taken <= {me.seen.pack}:
                yield to("publish", put(state, me.seen))
            elif not rules.steps_over:
                yield to("ended", state._replace(has_conflict=True))
            elif home == me.seen:
                above = Manifest(max(home.generation, state.highest.generation) + 1, home.pack, is_local=True)
                yield to("put pack", with_lower_moved(state._replace(here=state.here | {above}), above), seen=above)
            else:
                yield ended(state)
        case "publish":
            target = Manifest(me.seen.generation + 1, me.seen.pack, is_local=not me.seen.is_local)
            if home == me.seen:
                yield to("see", state._replace(here=state.here | {target}), seen=target)
            else:
                yield ended(state)
        case "see":
            yield ended(settled(state, me.seen))


def cleaned(state: TierState, rules: TierRules) -> TierState:
    """Remove lower copies whose highest one is whole, and packs that nothing names."""
    copies = frozenset({state.highest}) if state.is_whole(state.highest) else state.copies
    named = {form.pack for form in state.here}
    if rules.cleans_by_trash:
        named |= {form.pack for form in state.trash}
    if rules.cleans_by_copies:
        named |= {copy.pack for copy in copies}
    return state._replace(copies=copies, packs=state.packs & named)
