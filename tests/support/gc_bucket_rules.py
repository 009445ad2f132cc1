"""The rules of ckstore's deletions in a bucket, where nothing can be renamed; a model for gc_model.py.

One chunk is in one pack, and at the start no manifest names that pack. Writers want to use it, collectors want to
remove it.

A writer chooses the pack, publishes a manifest that names it, *then* reads all lists of collectors, *then* checks the
pack, and acknowledges if no list names it and it is there; else it withdraws. Afterwards retention may drop the
manifest.

A collector lists manifests; if none names the pack, it writes a list of its own that does, lists manifests *again*, and
removes the pack if still none names it. A request to remove it takes effect some time after it was sent; its answer may
be lost, and then the list stays. Otherwise the collector takes its list away. It crashes anywhere, and starts again
with another list; the one that it has left may be taken away once nothing that it has sent may still take effect.

The property: a pack that an acknowledged, retained manifest names is there, and stays there.

Limits: one pack, at most two writers and two collectors, one crash for each. Listing and looking are linearizable (S3
since 2020; so are GCS and Azure). That a dead collector's requests have all taken effect is a matter of time, and here
simply known. Manifests in the trash count as manifests: retention's drop is the moment when the last one goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from support.gc_rules import Move

ENDED = {"acked", "dead", "withdrawn", "writes it again"}


class Writer(NamedTuple):
    at: str = "choose"
    has_manifest: bool = False
    is_acked: bool = False


class Collector(NamedTuple):
    at: str = "list"
    has_list: bool = False
    crashes_left: int = 1


class BucketState(NamedTuple):
    is_there: bool
    is_being_removed: bool  # a request that was sent, and has not taken effect
    has_dead_list: bool
    writers: tuple[Writer, ...]
    collectors: tuple[Collector, ...]

    @property
    def is_named(self) -> bool:
        return any(writer.has_manifest for writer in self.writers)

    @property
    def is_listed(self) -> bool:
        return self.has_dead_list or any(collector.has_list for collector in self.collectors)

    @property
    def is_violation(self) -> bool:
        return not self.is_there and any(writer.is_acked and writer.has_manifest for writer in self.writers)


class BucketRules(NamedTuple):
    """How packs are used and collected in a bucket, and what can be left out of it."""

    writers: int = 2
    collectors: int = 2
    reads_lists: bool = True
    looks_last: bool = True  # False: at the pack first, and then at the lists
    lists_again: bool = True  # False: manifests are listed before the list is written, and not again
    keeps_list_if_unsure: bool = True  # False: it goes although the answer to a removal was lost
    waits_for_requests: bool = True  # False: a dead collector's list goes while what it has sent may take effect
    strikes_others: bool = False  # True: a collector that has found the pack named takes everybody's list away

    def start(self) -> BucketState:
        return BucketState(True, False, False, (Writer(),) * self.writers, (Collector(),) * self.collectors)

    def moves(self, state: BucketState) -> Iterator[Move]:
        for i in range(self.writers):
            yield from writer_moves(state, i, self)
        for j in range(self.collectors):
            yield from collector_moves(state, j, self)
        if state.is_being_removed:
            yield "a removal takes effect", state._replace(is_there=False, is_being_removed=False)
        if state.has_dead_list and not (self.waits_for_requests and state.is_being_removed):
            yield "a dead collector's list goes", state._replace(has_dead_list=False)


def writer_moves(state: BucketState, i: int, rules: BucketRules) -> Iterator[Move]:
    """Everything writer `i` can do next, its death included."""
    me = state.writers[i]

    def to(at: str, label: str = "", **changes: bool) -> Move:
        writers = list(state.writers)
        writers[i] = me._replace(at=at, **changes)
        return f"writer {i}: {label or 'now at: ' + at}", state._replace(writers=tuple(writers))

    if me.at not in ENDED:
        yield to("dead", label="dies")
    first, second = ("read lists", "look") if rules.looks_last else ("look", "read lists")
    match me.at:
        case "choose":
            yield to("publish" if state.is_there else "writes it again")
        case "publish":
            yield to(first if rules.reads_lists else "look", has_manifest=True)
        case "read lists" | "look":
            is_bad = state.is_listed if me.at == "read lists" else not state.is_there
            if is_bad:
                yield to("withdrawn", has_manifest=False)
            elif me.at == second or not rules.reads_lists:
                yield to("acked", is_acked=True)
            else:
                yield to(second)
        case "acked" if me.has_manifest:
            yield to("acked", label="retention drops its manifest", has_manifest=False)


def collector_moves(state: BucketState, j: int, rules: BucketRules) -> Iterator[Move]:
    """Everything collector `j` can do next, a crash and a lost answer included."""
    me = state.collectors[j]

    def to(at: str, label: str = "", *, has_list: bool = me.has_list, **changes: bool) -> Move:
        collectors = list(state.collectors)
        collectors[j] = me._replace(at=at, has_list=has_list)
        return f"collector {j}: {label or 'now at: ' + at}", state._replace(collectors=tuple(collectors), **changes)

    if me.crashes_left and me.at != "list":
        collectors = list(state.collectors)
        collectors[j] = Collector("list", has_list=False, crashes_left=me.crashes_left - 1)
        is_left = state.has_dead_list or me.has_list
        yield f"collector {j}: crashes", state._replace(collectors=tuple(collectors), has_dead_list=is_left)
    match me.at:
        case "list":
            if state.is_there and not state.is_named:
                yield to("write list")
        case "write list":
            yield to("list again" if rules.lists_again else "remove", has_list=True)
        case "list again":
            if state.is_named and rules.strikes_others:
                collectors = [each._replace(has_list=False) for each in state.collectors]
                collectors[j] = me._replace(at="list", has_list=False)
                yield f"collector {j}: strikes all", state._replace(collectors=tuple(collectors), has_dead_list=False)
            else:
                yield to("strike" if state.is_named else "remove")
        case "remove":
            yield to("strike", "removes it", is_there=False)
            if state.is_there:
                is_left = state.has_dead_list or rules.keeps_list_if_unsure
                label = "sends a removal and gets no answer"
                yield to("list", label, has_list=False, is_being_removed=True, has_dead_list=is_left)
        case "strike":
            yield to("list", has_list=False)
