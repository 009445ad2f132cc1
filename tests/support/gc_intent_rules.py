"""The rules of tags and intents, as a model that a search can walk through; see gc_model.py.

May a checkpoint be dropped, or lose bits to a demotion, although a tag on it was acknowledged?

    One checkpoint. A maker declares its intent, reads the tags, and decides: a dropper makes the drop mark, a demoter
    publishes the next generation and then moves the exact one away. A tagger writes the tag, looks for an intent, then
    for a mark, and then either keeps the tag or takes it back. A collector removes intents: torn ones, and those whose
    maker it takes for dead, by their age, which a maker that was stopped for long is not.

    Maker and tagger die anywhere.

    The property: what was decided was not tagged, as far as was acknowledged before; and no tag is acknowledged on a
    checkpoint that has been dropped.

Limits
    One tagger, which sets its tag once. Listing and linking are taken as linearizable. In a bucket a mark is no link:
    there a maker looks for its intent right before, and the model would find the moment in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from support.gc_rules import Move

Intent = Literal["none", "torn", "whole"]


class IntentState(NamedTuple):
    intent: Intent
    is_decided: bool  # the mark is there, or the next generation is
    is_done: bool  # dropped, or the exact generation has gone
    maker: str
    tagger: str
    has_tag: bool
    acknowledged_first: bool  # the tag was acknowledged before anything was decided
    is_on_nothing: bool  # the tag was acknowledged after the checkpoint had been dropped

    @property
    def is_violation(self) -> bool:
        return (self.is_done and self.acknowledged_first) or self.is_on_nothing


class IntentRules(NamedTuple):
    """How intents are made, seen and removed."""

    demotes: bool = False
    appears_whole: bool = True  # False: created under its name, and written afterwards
    removes_old: bool = True  # a collector takes makers for dead that live
    is_tied: bool = True  # False: a decision does not depend on the intent being there
    intents_first: bool = True  # False: a tagger looks for a mark first

    def start(self) -> IntentState:
        return IntentState("none", False, False, "declare", "write", False, False, False)

    def moves(self, state: IntentState) -> Iterator[Move]:
        yield from maker_moves(state, self)
        yield from tagger_moves(state, self)
        if state.intent == "torn" or (state.intent == "whole" and self.removes_old):
            yield "collector: removes the intent", state._replace(intent="none")


def maker_moves(state: IntentState, rules: IntentRules) -> Iterator[Move]:
    """Everything the maker can do next, its death included."""

    def to(at: str, **changes: object) -> Move:
        return f"maker: now at: {at}", state._replace(maker=at, **changes)

    is_refused = rules.is_tied and state.intent == "none"
    if state.maker not in {"ended", "dead"}:
        yield to("dead")
    match state.maker:
        case "declare":
            yield to("read tags", intent="whole") if rules.appears_whole else to("fill", intent="torn")
        case "fill":
            # A file that lost its name takes what is written all the same.
            yield to("read tags", intent="whole" if state.intent == "torn" else "none")
        case "read tags":
            yield to("retract") if state.has_tag else to("decide")
        case "decide" if rules.demotes:
            yield to("look", is_decided=True)
        case "decide":
            yield to("retract") if is_refused else to("retract", is_decided=True, is_done=True)
        case "look":
            yield to("retract", is_decided=False) if is_refused else to("move lower")
        case "move lower":
            yield to("retract", is_done=True)
        case "retract":
            yield to("ended", intent="none")


def tagger_moves(state: IntentState, rules: IntentRules) -> Iterator[Move]:
    """Everything the tagger can do next, its death included."""
    is_dropped = state.is_done and not rules.demotes
    match state.tagger:
        case "write":
            yield "tagger: writes", state._replace(tagger="look", has_tag=True)
        case "look" | "look again":
            yield "tagger: dies", state._replace(tagger="dead")
            looks_for_intent = (state.tagger == "look") == rules.intents_first
            if state.intent == "whole" if looks_for_intent else is_dropped:
                yield "tagger: takes it back", state._replace(tagger="ended", has_tag=False)
            elif state.tagger == "look":
                yield "tagger: sees nothing", state._replace(tagger="look again")
            else:
                yield (
                    "tagger: is acknowledged",
                    state._replace(tagger="ended", acknowledged_first=not state.is_decided, is_on_nothing=is_dropped),
                )
