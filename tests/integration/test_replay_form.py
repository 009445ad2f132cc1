"""Protects checkpoints that training makes again: exact or refused, and their bases stay as long as they do."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import ckstore
from ckstore._testing import repository_of
from ckstore.config import DemotePolicy
from ckstore.errors import ConflictError, CorruptError, NotFoundError, ReplayError, UnsupportedError, UsageError
from ckstore.io.memory import MemoryBackend
from ckstore.store.listing import packs_in
from support.demotion_histories import filled
from support.states import difference

STEPS = (10, 20, 30, 40)
ALL = DemotePolicy(keep_newest=1, keep_every=0)
LONG = [float(number) for number in range(2000)]


def first_state():
    entry = {"exp_avg": torch.zeros(5, 7), "step": torch.tensor(0.0)}
    w = torch.arange(35, dtype=torch.float32).reshape(5, 7) / 7
    return {
        "model": {"w": w, "same": w[2:], "half": w.bfloat16()},
        "optimizer": {"state": {0: entry}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "random": np.arange(6, dtype=np.uint32),
        "losses": LONG,
        "step": 0,
    }


def train_until(state, step):
    """Train in place, as a loop does: every step depends on the step before."""
    entry, model = state["optimizer"]["state"][0], state["model"]
    for number in range(state["step"], step):
        gradient = torch.sin(model["w"] * (number + 1)) + float(state["random"][0] % 7)
        entry["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
        model["w"].sub_(entry["exp_avg"], alpha=0.01)
        model["half"].copy_(model["w"])
        entry["step"] += 1
        state["random"] *= np.uint32(1664525)
        state["random"] += np.uint32(1013904223)
    state["step"] = step


@pytest.fixture
def history():
    """An open store with the checkpoints of ``STEPS``, and the state of each step."""
    with ckstore.open(MemoryBackend(), policy=ckstore.Policy(threads=1, delta=False)) as store:
        state, held = first_state(), {}
        for step in STEPS:
            train_until(state, step)
            store.commit(state, step, metrics={"loss": 1 / step})
            held[step] = copy.deepcopy(state)
        yield store, held


def packs_nbytes(store):
    backend = repository_of(store).backend
    return sum(info.nbytes for _, info in packs_in(backend))


def forms(store):
    return {info.step: info.form for info in store.log()}


def test_training_makes_a_checkpoint_again(history):
    store, held = history
    report = store.demote(20, replay=train_until)
    assert (report.form, report.fidelity, report.bytes_written) == ("replay", "exact", 0)
    entry = next(entry for entry in report.entries if entry.step == 20)
    assert (entry.is_done, entry.form, entry.stored_after) == (True, "replay, from step 10", 0)
    assert forms(store) == {10: "whole", 20: "replay, from step 10", 30: "whole", 40: "whole"}
    assert difference(store.restore(20, replay=train_until), held[20]) is None
    assert store.restored.form == store.info(20).form == "replay, from step 10"
    assert store.info(20).metrics == {"loss": 1 / 20}
    for step in (10, 30, 40):
        assert difference(store.restore(step, exact=True, replay=train_until), held[step]) is None
    assert store.verify("decode").is_clean


def test_a_demotion_frees_the_bytes_and_keeps_the_base(history):
    store, held = history
    before = packs_nbytes(store)
    store.demote(policy=ALL, replay=train_until)
    assert forms(store) == {10: "whole", 20: "replay, from step 10", 30: "replay, from step 10", 40: "whole"}
    report = store.gc({"keep_last": 1, "keep_every": 30}, min_age=0, trash_for=0)
    assert [name.step for name in report.done.dropped] == [20]
    reasons = {verdict.step: verdict.reasons for verdict in report.runs[0].verdicts}
    assert reasons[10] == ("step 30, which is kept in replay form, begins from it",)
    assert packs_nbytes(store) < before
    assert difference(store.restore(30, replay=train_until), held[30]) is None
    assert [name.step for name in store.gc({"keep_last": 1}, min_age=0, trash_for=0).done.dropped] == [10, 30]
    assert difference(store.restore(), held[40]) is None


def test_a_state_is_filled_in_place(history):
    store, held = history
    store.demote(20, replay=train_until)
    live = first_state()
    w = live["model"]["w"]
    found = store.restore(20, into=live, replay=train_until)
    assert found is live
    assert found["model"]["w"] is w
    assert difference(live, held[20]) is None


def test_a_new_state_may_be_returned(history):
    store, held = history
    store.demote(20, replay=train_until)

    def returns_another(state, step):
        other = copy.deepcopy(state)
        train_until(other, step)
        return {"other": torch.zeros(3), **other}

    assert difference(store.restore(20, replay=returns_another), held[20]) is None
    live = first_state()
    assert difference(store.restore(20, into=live, replay=returns_another), held[20]) is None


def test_values_are_those_of_the_checkpoint(history):
    store, held = history
    store.demote(20, replay=train_until)

    def forgets_values(state, step):
        train_until(state, step)
        state.update(losses=[], step=-1)

    assert difference(store.restore(20, replay=forgets_values), held[20]) is None


def one_ulp_off(state, step):
    train_until(state, step)
    entry = state["optimizer"]["state"][0]["exp_avg"]
    entry.view(torch.int32)[4, 6] += 1


def one_ulp_off_from_the_start(state, step):
    state["model"]["w"].view(torch.int32)[4, 6] += 1
    train_until(state, step)


@pytest.mark.parametrize(
    ("code", "path"), [(one_ulp_off, "optimizer.state.0.exp_avg"), (one_ulp_off_from_the_start, "model.w")]
)
def test_one_ulp_is_refused_and_the_first_tensor_named(history, code, path):
    store, held = history
    store.demote(20, replay=train_until)
    with pytest.raises(ReplayError, match=r"has other bytes than it had then, after training from step 10") as caught:
        store.restore(20, replay=code)
    assert (caught.value.path, caught.value.facts["step"], caught.value.facts["base_step"]) == (path, 20, 10)
    assert "torch" in str(caught.value)
    with pytest.raises(ReplayError):
        store.demote(30, replay=code)
    assert forms(store)[30] == "whole"
    with pytest.raises(ReplayError):
        store.verify(ref=40, replay=code)
    report = store.demote(policy=ALL, replay=code)
    assert any(path in warning for warning in report.warnings)
    assert forms(store) == {10: "whole", 20: "replay, from step 10", 30: "whole", 40: "whole"}
    assert difference(store.restore(30), held[30]) is None


def drops_a_tensor(state, step):
    train_until(state, step)
    del state["model"]["half"]


def changes_a_shape(state, step):
    train_until(state, step)
    state["model"]["half"] = state["model"]["half"].reshape(7, 5)


def changes_a_dtype(state, step):
    train_until(state, step)
    state["model"]["half"] = state["model"]["half"].half()


def changes_strides(state, step):
    train_until(state, step)
    state["model"]["half"] = state["model"]["half"].t().contiguous().t()


@pytest.mark.parametrize(
    ("code", "match"),
    [
        (drops_a_tensor, r"model\.half is not in the state"),
        (changes_a_shape, r"model\.half has another layout: bfloat16 \(5, 7\).* then, bfloat16 \(7, 5\)"),
        (changes_a_dtype, r"model\.half has another layout: .* now"),
        (changes_strides, r"model\.half has another layout: .*strides \(7, 1\) then, .*strides \(1, 5\) now"),
    ],
)
def test_another_structure_is_refused(history, code, match):
    store, _ = history
    store.demote(20, replay=train_until)
    with pytest.raises(ReplayError, match=match):
        store.restore(20, replay=code)


def test_swapped_tensors_of_into_are_noticed(history):
    store, _ = history
    store.demote(20, replay=train_until)
    live = first_state()

    def swaps(state, step):
        train_until(state, step)
        entry, other = state["optimizer"]["state"][0], torch.empty(5, 7)
        other.copy_(entry["exp_avg"])
        entry["exp_avg"].copy_(state["model"]["w"])
        moved = {"w": entry["exp_avg"], "same": entry["exp_avg"][2:], "half": state["model"]["half"]}
        state["model"]["w"].copy_(other)
        entry = {**entry, "exp_avg": state["model"]["w"]}
        return {**state, "model": moved, "optimizer": {"state": {0: entry}}}

    with pytest.raises(UsageError, match="tensors of into= at other places"):
        store.restore(20, into=live, replay=swaps)


def test_errors_of_the_training_code_are_raised(history):
    store, held = history

    def fails(state, step):
        raise ZeroDivisionError("my loss")

    for call in (store.demote, lambda step, replay: store.verify(ref=step, replay=replay)):
        with pytest.raises(ZeroDivisionError, match="my loss"):
            call(20, replay=fails)
    assert repository_of(store).tags.intents_on(1) == []
    store.demote(20, replay=train_until)
    with pytest.raises(ZeroDivisionError, match="my loss"):
        store.restore(20, replay=fails)
    assert difference(store.restore(20, replay=train_until), held[20]) is None


def test_other_calls_say_what_to_do(history):
    store, _ = history
    store.demote(20, replay=train_until)
    calls = [
        lambda: store.restore(20),
        lambda: store.restore("seq:1", only="model.*"),
        lambda: store.diff(20, 30),
        lambda: store.stats(20),
        lambda: store.export_safetensors(20, "never.safetensors"),
        lambda: store.rewind(20),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"step 20 \(seq 1\) is in replay form.*[Cc]all restore\(20, replay="):
            call()
    with pytest.raises(UsageError, match="the whole state"):
        store.restore(20, only="model", replay=train_until)
    with pytest.raises(UsageError, match="takes a function"):
        store.restore(20, replay="train.py")
    with pytest.raises(UsageError, match="takes a function"):
        store.demote(policy=DemotePolicy(form="replay"))


def test_contents_are_listed(history):
    store, held = history
    store.demote(20, replay=train_until)
    found = store.contents(20)
    assert found.info.form == "replay, from step 10"
    assert {tensor.path: tensor.nbytes for tensor in found.tensors}["model.half"] == held[20]["model"]["half"].nbytes
    assert found.info.bytes_state == store.info(10).bytes_state
    assert found.info.tensor_count == store.info(10).tensor_count


def test_the_newest_checkpoint_stays_whole(history):
    store, held = history
    with pytest.raises(ConflictError, match="newest checkpoint is stored whole"):
        store.demote(40, replay=train_until)
    store.demote(30, replay=train_until)
    store.delete(40)
    assert store.latest().step == 20
    assert difference(store.restore(), held[20]) is None
    assert store.info("latest").step == 20
    assert any("replay form" in warning for warning in store.restored.warnings)
    with pytest.raises(ConflictError, match="newest checkpoint is stored whole"):
        store.demote(20, replay=train_until)


def test_a_base_can_neither_be_deleted_nor_demoted(history):
    store, held = history
    store.demote(30, replay=train_until)
    with pytest.raises(ConflictError, match=r"seq 1 \(step 20\) is needed: step 30 \(seq 2\)"):
        store.delete(20)
    with pytest.raises(ConflictError, match="stays exact: step 30"):
        store.demote(20)
    with pytest.raises(ConflictError, match="stays exact: step 30"):
        store.demote(20, replay=train_until)
    assert difference(store.restore(20, exact=True), held[20]) is None
    store.delete(30)
    store.delete(20)
    assert store.steps() == [10, 40]


def test_a_deleted_base_and_checkpoint_come_back(history):
    store, held = history
    store.demote(20, replay=train_until)
    store.delete(20)
    store.delete(10)
    info = store.undelete(20)
    assert (info.is_archival, info.generation) == (True, 1)
    with pytest.raises(NotFoundError, match=r"begins from step 10 \(seq 0\), which is not in place"):
        store.restore(f"seq:{info.seq}", replay=train_until)
    base = store.undelete(10)
    assert difference(store.restore(f"seq:{info.seq}", replay=train_until), held[20]) is None
    with pytest.raises(ConflictError, match="is needed"):
        store.delete(f"seq:{base.seq}")


@pytest.mark.parametrize("is_collected", [False, True])
def test_undelete_brings_the_exact_form_back(history, is_collected):
    store, held = history
    exact_id = store.info(20).checkpoint_id
    store.demote(20, replay=train_until)
    if is_collected:
        store.gc(min_age=0)
    assert store.info(20).origin_id == exact_id
    assert [kind for entry in store.trash() for kind in entry.kinds] == ["demoted"]
    info = store.undelete(20)
    assert (info.checkpoint_id, info.generation) == (exact_id, 2)
    assert difference(store.restore(20, exact=True), held[20]) is None
    store.delete(10)
    assert store.verify("decode").is_clean


def test_a_tagged_checkpoint_and_one_without_base_stay(history):
    store, _ = history
    store.tag(30, "good")
    with pytest.raises(ConflictError, match="is kept by the tag 'good'"):
        store.demote(30, replay=train_until)
    with pytest.raises(UsageError, match="no exact, whole checkpoint of a lower step precedes step 10"):
        store.demote(10, replay=train_until)
    store.demote(policy=ALL, replay=train_until)
    assert forms(store) == {10: "whole", 20: "replay, from step 10", 30: "whole", 40: "whole"}
    store.untag("good")
    store.demote(30, replay=train_until)
    store.tag(30, "good")
    assert store.info("good").form == "replay, from step 10"


def test_a_lossy_checkpoint_is_neither_base_nor_put_in_replay_form(history):
    store, held = filled(MemoryBackend(), 4)
    store.demote(1)

    def copies(state, step):
        return held[step]

    store.demote(2, replay=copies)
    assert store.info(1).fidelity == "near"
    assert store.info(2).form == "replay, from step 0"
    with pytest.raises(UnsupportedError, match="stored with a loss"):
        store.verify(ref=1, replay=copies)
    report = store.demote(policy=ALL, replay=copies)
    assert [entry.reason for entry in report.entries][1:3] == [
        "it is already in replay form",
        "it is already stored with a loss",
    ]
    assert difference(store.restore(2, replay=copies), held[2]) is None
    store.close()


def test_verify_trains_a_stretch_again(history):
    store, _ = history
    assert store.verify(replay=train_until).replayed == (
        "training from step 30 to step 40 makes the same 7 tensors again"
    )
    store.demote(20, replay=train_until)
    assert store.verify(ref=20, replay=train_until).replayed.startswith("training from step 10 to step 20")
    assert store.verify(ref=30, replay=train_until).replayed.startswith("training from step 10 to step 30")
    assert store.verify().replayed == ""
    with pytest.raises(UsageError, match="precedes step 10"):
        store.verify(ref=10, replay=train_until)


def test_a_damaged_base_is_named(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        state = first_state()
        for step in STEPS:
            train_until(state, step)
            store.commit(state, step, policy=ckstore.Policy(delta=False))
        store.demote(20, replay=train_until)
        manifest = repository_of(store).manifests.load(repository_of(store).manifests.listing().names[0])
        pack, frame = manifest.packs[0], manifest.frames[0]
        path = tmp_path / "store" / "packs" / pack.pack_id.hex()[:2] / f"{pack.pack_id.hex()}.pack"
        content = bytearray(path.read_bytes())
        content[frame.offset + 200] ^= 1
        path.chmod(0o600)
        path.write_bytes(content)
        with pytest.raises(CorruptError, match=r"step 10 \(seq 0\)"):
            store.restore(20, replay=train_until)
        assert not store.verify().is_clean


def test_policies_without_training_code_are_refused(history, tmp_path):
    store, _ = history
    for call in (
        lambda: store.set_demotion(DemotePolicy(form="replay")),
        lambda: ckstore.open(tmp_path / "other", demotion=DemotePolicy(form="replay")),
        lambda: ckstore.open(tmp_path / "other", demotion={"form": "replay"}),
    ):
        with pytest.raises(UsageError, match="ckstore demote --to replay"):
            call()
    store.set_demotion(ALL)
    assert "form" not in repository_of(store).backend.read_bytes("config.json", nbytes_max=10**6).decode()
    store.demote(replay=train_until)
    assert forms(store)[30] == "replay, from step 10"
    with pytest.raises(UsageError, match="form"):
        DemotePolicy(form="whole")


def test_a_dry_run_calls_nothing(history):
    store, _ = history

    def fails(state, step):
        raise AssertionError

    report = store.demote(policy=ALL, replay=fails, dry_run=True)
    planned = {entry.step: (entry.action, entry.form) for entry in report.entries}
    assert planned == {
        10: ("keep", "whole"),
        20: ("demote", "replay, from step 10"),
        30: ("demote", "replay, from step 10"),
        40: ("keep", "whole"),
    }
    assert set(forms(store).values()) == {"whole"}


def test_values_that_are_too_long_stay_where_they_are():
    with ckstore.open(MemoryBackend()) as store:
        state = {"w": torch.zeros(3), "text": "x" * (1 << 21), "step": 0}
        for step in (1, 2, 3):
            store.commit(state, step)
        with pytest.raises(UnsupportedError, match="values other than tensors have"):
            store.demote(2, replay=lambda state, step: None)
        report = store.demote(policy=ALL, replay=lambda state, step: None)
        assert [entry.is_final for entry in report.entries] == [False, True, False]


def test_commits_after_a_replay_continue_from_its_base(history):
    store, _ = history
    store.demote(20, replay=train_until)
    state = store.restore(20, replay=train_until)
    train_until(state, 25)
    receipt = store.commit(state, 25)
    assert store.info(25).parent == 1
    assert receipt.chunks_reused > 0
    assert difference(store.restore(25), state) is None
