"""The rules by which a pack in a tier is rewritten; a model for gc_model.py.

One checkpoint that was pushed: its manifest here names the pack ``a`` in the tier, and a copy of an earlier generation
of it lies there. Part of the pack is needed by nobody, so that a collector rewrites it; what it writes is ``b``, and
``c`` or ``d`` when it begins anew. Meanwhile somebody pulls the checkpoint and pushes it again.

A rewriter looks at both sides, copies what is needed to a new pack, publishes the next generation here unless another
has, sees the pack, and withdraws if it is gone, or else moves the lower generations to the trash. Then it looks again,
and puts there what is here *now*, under the number that it has here, if the copy there names another pack. It dies
anywhere and begins anew. A cleaner removes copies there that have a whole one above them, and packs that no manifest
names: none here, in the trash here, or there. A collector here moves the generations below a whole one to the trash,
and the trash is emptied at any time.

A pull brings the pack here and publishes the next generation. A push puts the pack there unless it is there, puts the
manifest there under the number that it has here, publishes the next one here, and sees to it as a rewriter does.

The property: here is a whole generation; what the trash here names is there; the tier, opened by itself, has a whole
copy; and nobody ever meets another manifest under a name that it puts: that would end in an error for ever.

Limits: one checkpoint, one pack of it at a time, one rewriter that begins anew twice, two pulls or pushes. Nobody drops
the checkpoint: that is model 2. Looking at all manifests and removing is one step here: that is bucket_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gc_rules import Move

NEW_PACKS = "dcb"
"""By turns that are left: ids are never used twice."""


class Form(NamedTuple):
    """A manifest: its generation, its pack, and whether that lies here."""

    generation: int
    pack: str
    is_local: bool = False


class Actor(NamedTuple):
    at: str = "look"
    seen: Form = Form(0, "")
    pack: str = ""
    turns_left: int = 2


class TierState(NamedTuple):
    here: frozenset[Form]
    trash: frozenset[str]  # packs of the tier that manifests in the trash here name
    copies: frozenset[Form]
    packs: frozenset[str]  # in the tier
    rewriter: Actor
    mover: Actor
    has_conflict: bool = False

    @property
    def home(self) -> Form:
        return max(self.here)

    @property
    def highest(self) -> Form:
        return max(self.copies)

    def is_whole(self, form: Form) -> bool:
        return form.is_local or form.pack in self.packs

    @property
    def is_violation(self) -> bool:
        is_lost = not any(map(self.is_whole, self.here)) or not any(map(self.is_whole, self.copies))
        return self.has_conflict or is_lost or not self.trash <= self.packs


class TierRules(NamedTuple):
    """How a pack in a tier is rewritten, and what can be left out of it."""

    here_first: bool = True  # False: the copy there is renewed before the manifest here is replaced
    looks_after: bool = True  # False: the rewriter does not see to its pack after it has published
    bars_pulled: bool = True  # False: what was pulled meanwhile is rewritten there, too
    cleans_by_copies: bool = True  # False: what only a copy there names is removed
    cleans_by_trash: bool = True  # False: what only the trash here names is removed

    def start(self) -> TierState:
        here, copies, packs = frozenset({Form(1, "a")}), frozenset({Form(0, "a")}), frozenset("a")
        return TierState(here, packs, copies, packs, Actor(), Actor())

    def moves(self, state: TierState) -> Iterator[Move]:
        yield from rewriter_moves(state, self)
        yield from mover_moves(state)
        yield "the trash is emptied", state._replace(trash=frozenset())
        if state.is_whole(state.home):
            yield "lower generations go", with_lower_moved(state, state.home)
        yield "cleaner", cleaned(state, self)


def put(state: TierState, form: Form) -> TierState:
    """Put a manifest there, create-only."""
    taken = [copy for copy in state.copies if copy.generation == form.generation and copy.pack != form.pack]
    copies = state.copies | {Form(form.generation, form.pack)}
    return state._replace(has_conflict=True) if taken else state._replace(copies=copies)


def with_lower_moved(state: TierState, form: Form) -> TierState:
    """Move what lies below a generation here to the trash, where it names its pack."""
    lower = {each for each in state.here if each.generation < form.generation}
    trash = state.trash | {each.pack for each in lower if not each.is_local}
    return state._replace(here=state.here - lower, trash=trash)


def settled(state: TierState, form: Form) -> TierState:
    """See the pack of what was published, and withdraw it, or let it take the place of what is below."""
    if form not in state.here or state.is_whole(form):
        return with_lower_moved(state, form) if form in state.here else state
    return state._replace(here=state.here - {form}) if len(state.here) > 1 else state


def rewriter_moves(state: TierState, rules: TierRules) -> Iterator[Move]:
    """Everything the rewriter can do next; that it dies is that it begins anew."""
    me, home = state.rewriter, state.home

    def to(at: str, after: TierState = state, **changes: object) -> Move:
        return f"rewriter: now at: {at}", after._replace(rewriter=me._replace(at=at, **changes))

    if me.at != "look" and me.turns_left:
        yield "rewriter: begins anew", state._replace(rewriter=Actor(turns_left=me.turns_left - 1))
    match me.at:
        case "look":
            follows = not home.is_local and state.highest.generation <= home.generation
            if (follows or not rules.bars_pulled) and len(state.here) == 1:
                yield to("copy", seen=home, pack=NEW_PACKS[me.turns_left])
            yield to("look at copies")
        case "copy":
            after = state._replace(packs=state.packs | {me.pack})
            yield to("publish" if rules.here_first else "put early", after)
        case "put early":
            yield to("publish", put(state, Form(me.seen.generation + 1, me.pack)))
        case "publish":
            target = Form(me.seen.generation + 1, me.pack)
            if home.is_local and home == me.seen:
                # Only where what was pulled is not barred: nothing here names the tier.
                yield to("put", seen=Form(state.highest.generation + 1, me.pack))
            elif home == me.seen:
                yield to("see", state._replace(here=state.here | {target}), seen=target)
            else:
                yield to("look at copies")
        case "see":
            see = settled if rules.looks_after else with_lower_moved
            yield to("look at copies", see(state, me.seen))
        case "look at copies":
            is_outdated = not home.is_local and state.highest.generation < home.generation
            if is_outdated and state.highest.pack != home.pack and home.pack in state.packs:
                yield to("put", seen=Form(home.generation, home.pack))
        case "put":
            yield to("ended", put(state, me.seen))


def mover_moves(state: TierState) -> Iterator[Move]:
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
            yield to("publish", put(state, me.seen))
        case "publish":
            target = Form(me.seen.generation + 1, me.seen.pack, is_local=not me.seen.is_local)
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
        named |= state.trash
    if rules.cleans_by_copies:
        named |= {copy.pack for copy in copies}
    return state._replace(copies=copies, packs=state.packs & named)
