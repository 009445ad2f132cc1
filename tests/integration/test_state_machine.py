"""Any order of commit, restore, reopen, crash, tag, rewind and delete, against a plain dict model.

A crash drops the handle without closing it and leaves what a killed commit leaves: claims, torn packs, drafts. In
memory and on disk.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, NotFoundError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from ckstore.store.lease import Lease
from support.model import ModelStore, difference
from support.strategies import numpy_leaves, states

STEPS = st.integers(0, 6)
TAGS = st.sampled_from(["good", "bad", "v1.0"])
METRICS = st.dictionaries(st.sampled_from(["loss", "acc"]), st.integers(-3, 3).map(float), max_size=2)
POLICIES = st.sampled_from([ckstore.Policy(compression=kind, threads=1) for kind in ("none", "fast", "best")])


class Killed(BaseException):
    """Ends a commit like SIGKILL: no handler of ckstore catches it."""


class StoreMachine(RuleBasedStateMachine):
    """One run of a store and its model; a subclass says where the store is."""

    drawn = Bundle("drawn")

    def __init__(self):
        super().__init__()
        self.model = ModelStore()
        self.parent = None
        self.store = None
        self.claimed = -1
        self.open()

    def open_backend(self):
        raise AssertionError("a subclass says where")

    def open(self):
        self.store = ckstore.open(self.open_backend())
        self.parent = None

    def seqs(self):
        return sorted(self.model.entries)

    def pick(self, number):
        return self.seqs()[number % len(self.seqs())]

    # Writing

    @rule(target=drawn, state=states(st.one_of(numpy_leaves(), st.integers(), st.floats()), leaves_max=5))
    def draw_state(self, state):
        return state

    @rule(target=drawn, state=drawn, size=st.sampled_from([1, 1000, 70_000]), fill=st.integers(0, 2))
    def enlarge_state(self, state, size, fill):
        return {**state, "large": np.full(size, fill, np.int32)}

    @rule(state=drawn, step=STEPS, metrics=METRICS, policy=POLICIES, tags=st.lists(TAGS, unique=True, max_size=2))
    def commit(self, state, step, metrics, policy, tags):
        receipt = self.store.commit(state, step, metrics=metrics, policy=policy, tags=tags)
        assert receipt.seq > self.claimed
        assert (receipt.step, receipt.warnings) == (step, ())
        self.model.commit(receipt.seq, step, state, metrics=metrics, parent=self.parent)
        self.model.tags.update(dict.fromkeys(tags, receipt.seq))
        self.parent = self.claimed = receipt.seq

    @precondition(lambda self: self.model.entries)
    @rule(number=st.integers(0, 99))
    def rewind(self, number):
        seq = self.pick(number)
        info = self.store.rewind(f"seq:{seq}")
        self.model.rewind(seq, info.seq)
        self.parent = self.claimed = info.seq

    @precondition(lambda self: self.model.entries)
    @rule(number=st.integers(0, 99), name=TAGS)
    def tag(self, number, name):
        self.store.tag(f"seq:{self.pick(number)}", name)
        self.model.tags[name] = self.pick(number)

    @rule(name=TAGS)
    def untag(self, name):
        if name in self.model.tags:
            self.store.untag(name)
            del self.model.tags[name]
        else:
            with pytest.raises(NotFoundError):
                self.store.untag(name)

    @rule(step=STEPS)
    def delete_step(self, step):
        seqs = {entry.seq for entry in self.model.of_step(step)}
        self.delete(step, seqs)

    @precondition(lambda self: self.model.entries)
    @rule(number=st.integers(0, 99))
    def delete_seq(self, number):
        self.delete(f"seq:{self.pick(number)}", {self.pick(number)})

    def delete(self, reference, seqs):
        if not seqs:
            with pytest.raises(NotFoundError):
                self.store.delete(reference)
        elif seqs & set(self.model.tags.values()):
            with pytest.raises(ConflictError):
                self.store.delete(reference)
        else:
            assert set(self.store.delete(reference).seqs) == seqs
            self.model.delete(seqs)

    # Ending

    @rule()
    def reopen(self):
        self.store.close()
        self.open()

    @rule(state=drawn, step=STEPS, call=st.integers(0, 40))
    def crash(self, state, step, call):
        """Kill a commit at a call to the backend, then drop the handle."""
        parts = repository_of(self.store)
        backend = parts.backend
        seen = {"count": 0, "published": None}
        dying = _Dying(backend, call, seen)
        parts.backend = parts.manifests.backend = dying
        died = False
        try:
            receipt = self.store.commit(state, step)
            seen["published"] = receipt.seq
        except Killed:
            died = True
        parts.backend = parts.manifests.backend = backend
        if seen["published"] is not None:
            self.model.commit(seen["published"], step, state, parent=self.parent)
        self.claimed = max([self.claimed, *self.claims(backend)])
        lease: Lease = parts.lease
        lease._stop.set()
        if died or call % 2:
            # A killed process leaves its lease, but the owner is dead.
            from ckstore.store import lease as lease_module

            if lease._record is not None:
                lease_module._live_tokens.pop(lease._record.token, None)
            lease._record = None
        self.store.close()
        self.open()

    def claims(self, backend):
        names = map(paths.parse_claim_file, backend.list_names("claims/main"))
        return [claim.seq for claim in names if claim is not None]

    # Reading

    @rule()
    def restore_newest(self):
        entry = self.model.latest
        if entry is None:
            assert self.store.latest() is None
            with pytest.raises(NotFoundError):
                self.store.restore()
            return
        assert difference(self.store.restore(), entry.state) is None
        assert self.store.restored.seq == entry.seq == self.store.latest().seq
        self.parent = entry.seq

    @precondition(lambda self: self.model.entries)
    @rule(number=st.integers(0, 99))
    def restore_seq(self, number):
        entry = self.model.entries[self.pick(number)]
        assert difference(self.store.restore(f"seq:{entry.seq}"), entry.state) is None
        self.parent = entry.seq

    @rule(step=STEPS)
    def restore_step(self, step):
        entries = self.model.of_step(step)
        if not entries:
            with pytest.raises(NotFoundError):
                self.store.restore(step)
            return
        assert difference(self.store.restore(step), entries[0].state) is None
        self.parent = entries[0].seq

    @rule(name=TAGS)
    def restore_tag(self, name):
        if name not in self.model.tags:
            with pytest.raises(NotFoundError):
                self.store.info(name)
            return
        assert self.store.info(name).seq == self.model.tags[name]

    @rule(metric=st.sampled_from(["loss", "acc"]), mode=st.sampled_from(["min", "max"]))
    def find_best(self, metric, mode):
        entry = self.model.best(metric, mode)
        if entry is None:
            with pytest.raises(NotFoundError):
                self.store.info(f"best:{metric}:{mode}")
        else:
            assert self.store.info(f"best:{metric}:{mode}").seq == entry.seq

    @rule()
    def verify(self):
        report = self.store.verify("decode")
        assert report.is_clean, report.damage
        assert report.checkpoint_count == len(self.model.entries)

    @invariant()
    def history_matches_model(self):
        log = self.store.log()
        wanted = [(entry.seq, entry.step, dict(entry.metrics)) for entry in self.model.newest_first]
        assert [(info.seq, info.step, info.metrics) for info in log] == wanted
        assert [info.parent for info in log] == [entry.parent for entry in self.model.newest_first]
        assert self.store.steps() == self.model.steps
        assert self.store.tags() == dict(sorted(self.model.tags.items()))

    def teardown(self):
        if self.store is not None:
            self.store.close()


class _Dying:
    """A backend that is killed at its n-th call, and records what was published before."""

    def __init__(self, inner, call, seen):
        self._inner, self._call, self._seen = inner, call, seen

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found) or name in ("location_of", "close"):
            return found

        def call(*arguments, **options):
            if self._seen["count"] >= self._call:
                raise Killed
            self._seen["count"] += 1
            result = found(*arguments, **options)
            if name == "link" and arguments[1].startswith("manifests/"):
                self._seen["published"] = int(arguments[1].rsplit("/", 1)[1].split("-")[0])
            return result

        return call


class MemoryMachine(StoreMachine):
    """In memory."""

    def open_backend(self):
        if not hasattr(self, "backend"):
            self.backend = MemoryBackend()
        return self.backend


class DiskMachine(StoreMachine):
    """In a folder, with the engine that this machine supports."""

    def open_backend(self):
        if not hasattr(self, "folder"):
            self.folder = Path(tempfile.mkdtemp(prefix="ckstore-machine-"))
        return self.folder / "store"

    def teardown(self):
        super().teardown()
        shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("ckstore")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def test_store_in_memory_matches_model():
    run_state_machine_as_test(MemoryMachine)


def test_store_on_disk_matches_model():
    examples = max(5, settings.default.max_examples // 5)
    run_state_machine_as_test(DiskMachine, settings=settings(settings.default, max_examples=examples))


def test_machine_detects_a_lost_entry(monkeypatch):
    # The negative control: hiding the oldest entry must be detected. One failing example is enough.
    log = ckstore.Store.log
    monkeypatch.setattr(ckstore.Store, "log", lambda self: log(self)[:1])
    control = settings(
        max_examples=2000,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        database=None,
        print_blob=False,
        deadline=None,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(MemoryMachine, settings=control)
