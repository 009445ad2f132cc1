"""What the crash tests do to a store, and what must hold afterwards.

Used by the tests and by the children that they kill: numpy only, and every state can be recomputed from its number. An
acknowledgement is a line ``verb fact...`` that is written after the call returned.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.api import Store
from ckstore.io.local import LocalBackend
from ckstore.ops.gc.policy import Retention
from ckstore.store.repository import Repository
from support.faults import SyncSkippingBackend
from support.model import difference

QUIET_POLICY = ckstore.Policy(threads=1, memory_nbytes_max=64 << 20)
"""One thread: the same calls in the same order every time."""

DRIFTING = 2000
"""From this number on states have something that drifts."""

RUN = "main"
Ack = Callable[[str], None]


@functools.lru_cache(maxsize=256)
def state_of(number):
    """Return the state that belongs to a number: a part that never changes, one that always does, and plain values.

    Nobody may change it.
    """
    rng = np.random.default_rng(number)
    drift = {}
    if number >= DRIFTING:
        # Weights that hardly change from one number to the next: worth storing as differences.
        weights = np.random.default_rng(0).standard_normal(6000).astype(np.float32)
        drift = {"drift": weights + rng.standard_normal(6000).astype(np.float32) * np.float32(1e-5)}
    return {
        **drift,
        "shared": np.arange(600, dtype=np.float32).reshape(20, 30),
        "own": rng.standard_normal((17, 31)).astype(np.float32),
        "pair": (rng.integers(0, 9, 50), np.full(40, number % 3, dtype=np.uint8)),
        "number": number,
    }


def open_store(place, **options):
    return ckstore.open(place, run=RUN, policy=QUIET_POLICY, **options)


def commit(store, number, step, ack, **options):
    receipt = store.commit(state_of(number), step, **options)
    ack(f"commit {receipt.seq} {step} {number}")
    return receipt


def init(place, ack):
    """Make a store, and commit nothing."""
    open_store(place).close()


def first_commit(place, ack):
    with open_store(place) as store:
        commit(store, 100, 1, ack)


def one_commit(place, ack):
    with open_store(place) as store:
        commit(store, 101, 50, ack)


def recommit(place, ack):
    """Commit with reuse: the state of an old step again, a changed one, and one with all bytes known."""
    with open_store(place) as store:
        store.restore()
        commit(store, 1, 2, ack)
        commit(store, 102, 60, ack)
        commit(store, 102, 60, ack)


def maintain(place, ack):
    """Tag, rewind, delete, untag: everything that changes history without new bytes."""
    with open_store(place) as store:
        store.tag(1, "keep")
        ack("tag keep 0")
        receipt = store.rewind(1)
        ack(f"commit {receipt.seq} 1 0")
        ack("deleting 1")
        store.delete(2)
        ack("deleted 1")
        store.tag(1, "keep")
        store.untag("keep")
        commit(store, 103, 70, ack)


def read(place, ack):
    """Restore by every way, verify and list: what fails must be loud, and what is returned right."""
    with open_store(place) as store:
        for number in (0, 1):
            assert difference(store.restore(number + 1), state_of(number)) is None
        newest = store.restore()
        assert difference(newest, state_of(newest["number"])) is None
        store.restore(only="pair.*")
        store.verify(level="decode")
        assert [info.step for info in store.log()] == [2, 1]


def repack(place, ack):
    """Commit plain bytes, repack them as a keyframe and deltas, then commit again."""
    plain = replace(QUIET_POLICY, compression="none")
    with open_store(place) as store:
        for step, number in ((80, 2001), (81, 2002), (82, 2003)):
            commit(store, number, step, ack, policy=plain)
        ids = [info.checkpoint_id for info in store.log()]
        report = store.repack()
        ack("repacked")
        assert [entry.action for entry in report.rewritten] == ["keyframe", "delta", "delta"]
        assert [info.checkpoint_id for info in store.log()] == ids
        commit(store, 2004, 83, ack)


def collect(place, ack):
    """Drop by rules, rewrite what is left of packs, bring a dropped one back, free the trash; then commit on top."""
    plain = replace(QUIET_POLICY, compression="none")
    with open_store(place) as store:
        for step, number in ((80, 2006), (81, 2009), (82, 2012)):
            # They share one chunk, which the first of them has written.
            commit(store, number, step, ack, policy=plain)
        seqs = sorted(info.seq for info in store.log())
        for seq in seqs[:-2]:
            ack(f"deleting {seq}")
        other = Store(Repository(repository_of(store).backend, repository_of(store).record, RUN), QUIET_POLICY)
        report = other.gc(Retention(keep_last=2), min_age=0)
        for name in report.done.dropped:
            ack(f"deleted {name.seq}")
        ack(f"replaced {report.done.repacked.manifests}")
        ack(f"undeleted {other.undelete(f'seq:{seqs[-3]}').seq} 80 2006")
        report = other.gc(min_age=0, now=True)
        ack(f"freed {report.done.freed_files}")
        commit(store, 2015, 83, ack)


def stream(place, ack):
    """Commit one new state after another, until something ends it."""
    with open_store(place) as store:
        for step in range(1000, 1200):
            commit(store, int.from_bytes(os.urandom(4), "little"), step, ack)


def large(place, ack):
    """Commit and restore some chunks of several MiB, and say which engine moved them."""
    messages = logging.Handler()
    messages.emit = lambda record: ack(f"log {record.getMessage()}")
    logging.getLogger("ckstore").addHandler(messages)
    logging.getLogger("ckstore").setLevel(logging.INFO)
    state = {"large": np.random.default_rng(5).standard_normal(3_000_001).astype(np.float32), **state_of(5)}
    for step in (1, 2):
        with open_store(place) as store:
            receipt = store.commit(state, step)
            ack(f"engine {receipt.engine}")
            assert difference(store.restore(), state) is None
            state["large"] += 1


SCENARIOS = {
    "init": init,
    "first": first_commit,
    "commit": one_commit,
    "recommit": recommit,
    "maintain": maintain,
    "repack": repack,
    "collect": collect,
    "read": read,
    "stream": stream,
    "large": large,
}


def prepare(place, count=2):
    """Make a store with commits of steps 1, 2, ... that hold states 0, 1, ...; return their acknowledgements."""
    acks: list[str] = []
    with open_store(place) as store:
        for number in range(count):
            commit(store, number, number + 1, acks.append)
    return acks


@dataclass
class Acknowledged:
    """What acknowledgements promise: which seq holds which state, and what may be gone."""

    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    archival: set[int] = field(default_factory=set)

    @staticmethod
    def of(acks):
        acknowledged = Acknowledged()
        for line in acks:
            verb, *facts = line.split()
            if verb in ("commit", "undeleted"):
                seq, step, number = map(int, facts)
                assert seq not in acknowledged.held, f"seq {seq} was acknowledged twice"
                acknowledged.held[seq] = step, number
                acknowledged.archival |= {seq} if verb == "undeleted" else set()
            elif verb == "deleting":
                acknowledged.doubtful.add(int(facts[0]))
            elif verb == "deleted":
                acknowledged.gone.add(int(facts[0]))
        return acknowledged

    @property
    def latest(self):
        return max((seq for seq in self.held if seq not in self.gone | self.doubtful | self.archival), default=-1)


def check_acknowledged(store, acknowledged):
    """Every acknowledged checkpoint comes back bit for bit, and the newest one is at least the newest acknowledged."""
    seen = {info.seq: info.step for info in store.log()}
    assert not acknowledged.gone & set(seen), f"deleted seqs are back: {acknowledged.gone & set(seen)}"
    newest_seq = None
    if acknowledged.latest >= 0:
        newest = store.restore()
        newest_seq = store.restored.seq
        assert newest_seq >= acknowledged.latest, f"latest is {newest_seq}, not {acknowledged.latest}"
        found = difference(newest, state_of(newest["number"]))
        assert found is None, f"newest: {found}"
    for seq, (step, number) in acknowledged.held.items():
        if seq in acknowledged.gone or (seq in acknowledged.doubtful and seq not in seen):
            continue
        assert seen.get(seq) == step, f"seq {seq} of step {step} was acknowledged and is not listed"
        if seq == newest_seq:
            assert newest["number"] == number, f"seq {seq} holds state {newest['number']}, not {number}"
            continue
        found = difference(store.restore(f"seq:{seq}"), state_of(number))
        assert found is None, f"seq {seq}: {found}"


def check_next_commit(store, acknowledged, *, number=900):
    """The next commit works without repair, under a seq nobody was ever given."""
    receipt = store.commit(state_of(number), 999)
    assert receipt.seq > max(acknowledged.held, default=-1), "a seq was given twice"
    assert difference(store.restore(), state_of(number)) is None
    assert difference(store.restore(f"seq:{receipt.seq}"), state_of(number)) is None


def check_store(place, acks, *, level="decode", **options):
    """Open the store as after a crash and check all that was promised; raises AssertionError."""
    acknowledged = Acknowledged.of(acks)
    with open_store(place, **options) as store:
        check_acknowledged(store, acknowledged)
        check_next_commit(store, acknowledged)
        report = store.verify(level=level)
        assert not damage_of(report), f"verify found damage: {damage_of(report)}"


def damage_of(report):
    """Return what verify found, whatever the report calls it."""
    for name in ("damage", "problems", "damages"):
        if hasattr(report, name):
            return list(getattr(report, name))
    raise AssertionError(f"no list of damage in {report!r}")


def file_acks(path: Path) -> Ack:
    """Return a function that appends lines to a file outside the store, unbuffered.

    By writev, which ckstore does not use: a call of the store that is made to fail is never one of ours.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def ack(line: str) -> None:
        os.writev(fd, [f"{line}\n".encode()])

    return ack


def read_acks(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def backend_of(place, engine, skips=(), after_link=False, try_direct=True):
    """Return a local backend with the engine, wrapped in a forgetful one where syncs are to be left out."""
    backend = LocalBackend(place, engine=engine, try_direct=try_direct)
    return SyncSkippingBackend(backend, skips, after_link=after_link) if skips or after_link else backend
