"""Protects journals against users and disks: every step comes back exactly, or an error says what to do."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CapacityError, ReplayError, UsageError
from ckstore.format.journal import RECORD_HEAD_NBYTES, SEGMENT_HEADER_NBYTES
from ckstore.format.wire import sealed
from ckstore.state.capture import capture, loaded_adapters
from ckstore.store.journals import Journals


class Training:
    """A small run; a second optimizer has parameters of the same shapes."""

    def __init__(self, *, two=False):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.other = torch.nn.Linear(5, 3) if two else None
        self.optimizers = [self.optimizer]
        if two:
            self.optimizers.append(torch.optim.AdamW(self.other.parameters(), 1e-2))

    @property
    def state(self):
        return {"models": [self.model, self.other], "optimizers": self.optimizers}

    def train(self, number, *, scale=1.0, which=(0,)):
        for index in which:
            torch.manual_seed(number)
            model = (self.model, self.other)[index]
            (scale * model(torch.randn(4, 5)).square().mean()).backward()
            self.optimizers[index].step()
            self.optimizers[index].zero_grad()


def bits(state):
    captured = capture(state, loaded_adapters())
    return captured.tree, [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]


def closure(training):
    def compute():
        loss = training.model(torch.ones(2, 5)).sum()
        loss.backward()
        return loss

    training.optimizer.step(compute)


def gradient_replaced(training):
    def replace(*_):
        training.model.weight.grad = training.model.weight.grad * 2

    handle = training.optimizer.register_step_pre_hook(replace)
    training.train(3)
    handle.remove()


def group_added(training):
    training.other = torch.nn.Linear(2, 2)
    training.optimizer.add_param_group({"params": list(training.other.parameters()), "lr": 0.5})
    training.train(3)


def shape_changed(training):
    with torch.no_grad():
        training.model.weight.data = torch.cat([training.model.weight, torch.ones(1, 5)])
        training.model.bias.data = torch.cat([training.model.bias, torch.ones(1)])
    training.optimizer.state.clear()
    training.train(3)


def layer_frozen(training):
    training.model.bias.requires_grad_(False)
    training.train(3)


def changed_without_a_count(training):
    training.train(3)
    training.model.weight.data.mul_(0.5)


def weights_clamped(training):
    training.train(3)
    for parameter in training.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def infinite_and_nan(training):
    training.train(3, scale=float("nan"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (closure, "call step() without a closure"),
        (gradient_replaced, "replaced or changed inside the step; change it before the step"),
        (group_added, "groups or parameters of an optimizer have changed"),
        (shape_changed, "groups or parameters of an optimizer have changed"),
        (layer_frozen, "groups or parameters of an optimizer have changed"),
        (changed_without_a_count, "changed outside of a step"),
        (weights_clamped, "changed outside of a step"),
        (infinite_and_nan, None),
    ],
)
def test_the_state_comes_back_whatever_happened_in_a_step(tmp_path, change, reason, caplog):
    training, expected = Training(), {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in range(1, 6):
            if step == 3:
                change(training)
            else:
                training.train(step)
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
        assert sorted(info.step for info in store.log()) == ([1, 3] if reason else [1])
        for step, found in expected.items():
            assert bits(store.restore(step)) == found, step
    warned = [record.message for record in caplog.records if "stores the whole state instead" in record.message]
    assert len(warned) == bool(reason)
    assert all(reason in message for message in warned)


def write_three(place, training, **options):
    """Commit three steps; return their bits."""
    expected = {}
    with ckstore.open(place) as store:
        store.journal(*training.optimizers, **options)
        for step in (1, 2, 3):
            training.train(step, which=range(len(training.optimizers)))
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
    return expected


def test_optimizers_in_another_order_are_noticed(tmp_path):
    expected = write_three(tmp_path / "store", Training(two=True))
    other = Training(two=True)
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(*reversed(other.optimizers))
        with pytest.raises(ReplayError, match=r"other bytes.*step 2"):
            store.restore(3, into=other.state)
    other = Training(two=True)
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(*other.optimizers)
        store.restore(3, into=other.state)
    assert bits(other.state) == expected[3]


def test_a_missing_optimizer_is_an_error_that_says_what_to_pass(tmp_path):
    write_three(tmp_path / "store", Training(two=True))
    other = Training(two=True)
    with ckstore.open(tmp_path / "store", create=False) as store:
        store.journal(other.optimizers[0])
        with pytest.raises(UsageError, match=r"all optimizers of the run"):
            store.restore(into=other.state)


def keyframe_path(store, step):
    (name,) = (each for each in repository_of(store).manifests.listing().names if each.step == step)
    return Path(repository_of(store).backend.location_of(name.path))


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_point_is_restored_from_the_keyframe_before(tmp_path, harm, caplog):
    training, expected = Training(), {}
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer, keyframe_every=3)
        for step in range(1, 6):
            training.train(step)
            store.commit_async(training.state, step).result()
            expected[step] = bits(training.state)
        assert sorted(info.step for info in store.log()) == [1, 4]
        path = keyframe_path(store, 4)
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert bits(store.restore()) == expected[5]
        assert bits(store.restore(5)) == expected[5]


def test_a_point_without_any_keyframe_is_an_error_that_names_the_command(tmp_path):
    write_three(tmp_path / "store", Training())
    with ckstore.open(tmp_path / "store", create=False) as store:
        keyframe_path(store, 1).unlink()
    with ckstore.open(tmp_path / "store", create=False) as store:
        with pytest.raises(ckstore.NotFoundError, match="ckstore ls"):
            store.restore(3)
        with pytest.raises(ckstore.CorruptError, match="ckstore repair"):
            store.restore()


def test_a_record_of_a_newer_version_ends_the_journal_with_a_warning(tmp_path, caplog):
    expected = write_three(tmp_path / "store", Training())
    with ckstore.open(tmp_path / "store", create=False) as store:
        journal = Journals(repository_of(store).manifests).read()
        name = list(journal.segments)[-1]
        record = journal.records(name).records[-1]
        path = Path(repository_of(store).backend.location_of(name.path))
    content = bytearray(path.read_bytes())
    head = content[record.offset : record.offset + RECORD_HEAD_NBYTES]
    head[8] = 0xFF
    content[record.offset : record.offset + RECORD_HEAD_NBYTES] = sealed(bytes(head[:-8]), RECORD_HEAD_NBYTES)
    path.write_bytes(content)
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert bits(store.restore()) == expected[2]
    assert "a journal ends early" in caplog.text
    assert "Upgrade ckstore" in caplog.text


def test_a_segment_of_a_newer_version_is_skipped_with_a_warning(tmp_path, caplog):
    expected = write_three(tmp_path / "store", Training())
    segments = sorted((tmp_path / "store" / "journals").rglob("*.ckj"))
    for path in segments:
        content = bytearray(path.read_bytes())
        head = content[:SEGMENT_HEADER_NBYTES]
        head[8] = 0xFF
        content[:SEGMENT_HEADER_NBYTES] = sealed(bytes(head[:-8]), SEGMENT_HEADER_NBYTES)
        path.write_bytes(content)
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert bits(store.restore()) == expected[1]
        assert "skipping a segment of the journal" in caplog.text
        assert "Upgrade ckstore" in caplog.text
        store.gc(min_age=0)
    assert segments
    assert all(path.exists() for path in segments), "a newer version can read them"


def test_journal_without_an_optimizer_is_refused(tmp_path):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="without an optimizer"):
            store.journal()
        with pytest.raises(UsageError, match="not an optimizer"):
            store.journal([training.optimizer])
        assert store.commit_async(training.state, 1).result().seq == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"keyframe_every": 0},
        {"keyframe_every": -3},
        {"keyframe_every": 2.5},
        {"keyframe_every": True},
        {"replay_seconds": -1},
        {"replay_seconds": float("nan")},
        {"replay_seconds": None},
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, wrong):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            store.journal(training.optimizer, **wrong)
        store.journal(training.optimizer)


def limit_files(pid, nbytes):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("is_asked", [True, False], ids=["by result", "by the next commit"])
@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_in_a_point_is_raised_and_earlier_points_stay(tmp_path, is_asked):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in (1, 2):
            training.train(step)
            store.commit_async(training.state, step).result()
        second = bits(training.state)
        pid = store._journal._commits.saver_pid
        limit_files(pid, Path(next((tmp_path / "store" / "journals").rglob("*.ckj"))).stat().st_size + 100)
        training.train(3)
        pending = store.commit_async(training.state, 3)
        if is_asked:
            with pytest.raises(CapacityError):
                pending.result()
        else:
            store._journal.wait()
            with pytest.raises(CapacityError, match="step 3 failed in the background"):
                store.commit_async(training.state, 4)
        limit_files(pid, resource.RLIM_INFINITY)
        training.train(4)
        store.commit_async(training.state, 4).result()
        training.train(5)
        store.commit_async(training.state, 5).result()
        last = bits(training.state)
        assert sorted(info.step for info in store.log()) == [1, 4], "the next commit stores the whole state"
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert bits(store.restore(2)) == second
        assert bits(store.restore()) == last
        with pytest.raises(ckstore.NotFoundError):
            store.restore(3)


@pytest.mark.filterwarnings("ignore")
def test_closing_raises_the_error_of_a_point_that_was_never_asked_for(tmp_path):
    training = Training()
    store = ckstore.open(tmp_path / "store")
    store.journal(training.optimizer)
    training.train(1)
    store.commit_async(training.state, 1).result()
    training.train(2)
    store.commit_async(training.state, 2).result()
    limit_files(store._journal._commits.saver_pid, 100)
    training.train(3)
    store.commit_async(training.state, 3)
    with pytest.raises(CapacityError, match="step 3"):
        store.close()
    del store
    gc.collect()


def test_what_an_optimizer_owns_must_not_change_before_its_checksum_is_computed(tmp_path, monkeypatch):
    training = Training()
    changes = []

    def compute(captured, only=None, **options):
        if changes:
            changes.pop()()
        return original(captured, only, **options)

    from ckstore.background import journal

    original = journal.checksums_of
    monkeypatch.setattr(journal, "checksums_of", compute)

    def change():
        with torch.no_grad():
            training.model.weight.add_(1)

    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        training.train(1)
        store.commit_async(training.state, 1).result()
        training.train(2)
        changes.append(change)
        with pytest.raises(ckstore.CorruptError, match=r"wait_staged"):
            store.commit_async(training.state, 2).result()
        training.train(3)
        store.commit_async(training.state, 3).result()
        assert sorted(info.step for info in store.log()) == [1, 3]
        assert bits(store.restore()) == bits(training.state)


def test_a_restore_never_steps_optimizers_of_another_state(tmp_path):
    training = Training()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        for step in (1, 2, 3):
            training.train(step)
            store.commit_async(training.state, step).result()
        last = bits(training.state)
        assert bits(store.restore(2)) != last
        assert bits(training.state) == last, "into=None makes new objects"
        with pytest.raises(UsageError, match="restore the model and the optimizer together"):
            store.restore(3, into=Training().state)
        assert bits(training.state) == last
