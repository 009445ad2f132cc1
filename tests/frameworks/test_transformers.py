"""The door into the Trainer: folders, retention, references, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckstore
from ckstore.errors import CapacityError, NotFoundError, UnsupportedError, UsageError
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import is_pointer, read_pointer
from support.small_trainers import losses_of, make_trainer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def scored_trainer():
    """Return the class; making it imports the Trainer, which takes seconds."""

    class Scored(transformers.Trainer):
        """Its evaluations return prepared scores; a subclass, as users and libraries have them."""

        SCORES = (3.0, 5.0, 1.0, 4.0, 2.0, 4.5)

        def evaluate(self, *_, **__):
            metrics = {"eval_score": self.SCORES[self.state.global_step - 1]}
            self.log(metrics)
            return metrics

    return Scored


def attached(kind, folder, *, store=None, background=False, files="pointer", policy=None, **options):
    trainer = make_trainer(kind, folder, **options)
    ckstore.transformers.attach(trainer, store, background=background, files=files, policy=policy)
    return trainer


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of four steps, saved at 2 and 4."""
    folder = tmp_path_factory.mktemp("original") / "out"
    trainer = attached("gpt2", folder, max_steps=4)
    trainer.train()
    return SimpleNamespace(folder=folder, trainer=trainer)


@pytest.fixture
def trained(original, tmp_path):
    """Return a copy of that run: its folder, its losses, its trainer, and a store for more commits."""
    shutil.copytree(original.folder, tmp_path / "out")
    pointers = PointerStore(tmp_path / "out/ckstore", background=False, made_by="a test")
    losses = losses_of(original.trainer)
    yield SimpleNamespace(folder=tmp_path / "out", losses=losses, trainer=original.trainer, pointers=pointers)
    pointers.close()


def folders(output_dir):
    return sorted(path.name for path in output_dir.glob("checkpoint-*"))


def steps(output_dir):
    with ckstore.open(output_dir / "ckstore", create=False) as store:
        return sorted(info.step for info in store.log())


def test_folder_has_a_pointer_and_small_files(trained):
    names = {path.name for path in (trained.folder / "checkpoint-2").iterdir()}
    expected = {"ckstore.json", "config.json", "generation_config.json", "trainer_state.json", "training_args.bin"}
    assert names == expected
    pointer = read_pointer(trained.folder / "checkpoint-2")
    assert (pointer.seq, pointer.step, pointer.store) == (0, 2, "../ckstore")
    state = json.loads((trained.folder / "checkpoint-2/trainer_state.json").read_text())
    assert list(state["stateful_callbacks"]) == ["TrainerControl"]
    arguments = torch.load(trained.folder / "checkpoint-2/training_args.bin", weights_only=False)
    assert arguments.save_steps == 2


def test_training_is_not_changed(trained, tmp_path):
    plain = make_trainer("gpt2", tmp_path / "plain", max_steps=4)
    plain.train()
    assert trained.losses == losses_of(plain)


def test_background_saves_are_durable_at_the_end(tmp_path):
    trainer = attached("gpt2", tmp_path, background=True, save_total_limit=2)
    trainer.train()
    assert steps(tmp_path) == [6, 8]
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-8"]
    assert read_pointer(tmp_path / "checkpoint-8").seq is not None


@functools.cache
def trainer_with_notes():
    """Return the class; making it imports the Trainer, which takes seconds."""

    class WithNotes(transformers.Trainer):
        """Writes a file of its own into the folder of each checkpoint, after the rest, as trainers of TRL do."""

        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            folder = self.args.output_dir + f"/checkpoint-{self.state.global_step}"
            Path(folder, "notes").mkdir()
            Path(folder, "notes/rollout.json").write_text("{}")

    return WithNotes


def test_files_of_a_subclass_are_stored(tmp_path):
    trainer = make_trainer("gpt2", tmp_path, kind=trainer_with_notes(), max_steps=2)
    ckstore.transformers.attach(trainer, background=False)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-2")
    attached("gpt2", tmp_path, save_strategy="no").train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-2/notes/rollout.json").read_text() == "{}"


def test_scaler_comes_back(tmp_path):
    runs = []
    for resume in (None, "seq:0"):
        trainer = attached("gpt2", tmp_path)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        trainer.train(resume_from_checkpoint=resume)
        runs.append((losses_of(trainer), trainer.accelerator.scaler.state_dict()))
    assert runs[0] == runs[1]
    assert runs[0][1]["scale"] == 4096.0


def test_trial_of_a_search_is_left_to_transformers(tmp_path):
    trainer = attached("gpt2", tmp_path, background=True, max_steps=2)
    trainer.hp_search_backend = "optuna"
    trainer.hp_name = lambda trial: f"trial-{trial}"
    trainer._get_output_dir = lambda trial: str(tmp_path / "trial")
    trainer.train()
    assert (tmp_path / "trial/checkpoint-2/model.safetensors").exists()
    assert not (tmp_path / "ckstore").exists()


CASES = [
    pytest.param(limit, loads_best, is_greater, strategy, id=f"{limit}-{loads_best}-{is_greater}-{strategy}")
    for limit in (1, 2, 3)
    for loads_best in (False, True)
    for is_greater in (False, True)
    for strategy in ("steps", "best")
]


@pytest.mark.deep(parts=12)
@pytest.mark.parametrize(("limit", "loads_best", "is_greater", "strategy"), CASES)
def test_same_checkpoints_survive_as_without_a_store(limit, loads_best, is_greater, strategy, tmp_path):
    left = []
    for name in ("plain", "stored"):
        options = {"save_total_limit": limit, "load_best_model_at_end": loads_best, "greater_is_better": is_greater}
        steps_options = {"max_steps": 6, "save_steps": 1, "eval_steps": 1, "per_device_train_batch_size": 1}
        trainer = make_trainer(
            "gpt2",
            tmp_path / name,
            kind=scored_trainer(),
            eval_strategy="steps",
            save_strategy=strategy,
            metric_for_best_model="score",
            **options,
            **steps_options,
        )
        if name == "stored":
            ckstore.transformers.attach(trainer)
        trainer.train()
        best = trainer.state.best_model_checkpoint
        left.append((folders(tmp_path / name), best and best.rpartition("/")[2], trainer.model.state_dict()))
    plain, stored = left
    assert stored[:2] == plain[:2]
    assert all(torch.equal(plain[2][name], stored[2][name]) for name in plain[2])
    assert [f"checkpoint-{step}" for step in steps(tmp_path / "stored")] == stored[0]


def test_best_is_found_by_its_metric(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3}
    trainer = make_trainer("gpt2", tmp_path, kind=scored_trainer(), **options)
    ckstore.transformers.attach(trainer, background=False)
    trainer.train()
    with ckstore.open(tmp_path / "ckstore") as store:
        assert store.info("best:eval_score:min").step == 3
        assert store.info("best:eval_score:max").step == 2
        metrics = store.info(2).metrics
    assert metrics["eval_score"] == 5.0
    assert set(metrics) == {"eval_score", "loss", "grad_norm", "learning_rate", "epoch"}
    again = attached("gpt2", tmp_path, max_steps=3)
    again.train(resume_from_checkpoint="best:eval_score:max")
    assert list(losses_of(again)) == [1, 2, 3]


def test_resume_true_takes_the_newest_of_the_store(trained):
    resumed = attached("gpt2", trained.folder)
    resumed.train(resume_from_checkpoint=True)
    assert {step: loss for step, loss in losses_of(resumed).items() if step <= 4} == trained.losses
    assert steps(trained.folder) == [2, 4, 6, 8]


def test_bare_store_on_a_new_machine(trained, tmp_path):
    shutil.copytree(trained.folder / "ckstore", tmp_path / "new/ckstore")
    shutil.rmtree(trained.folder)
    resumed = attached("gpt2", tmp_path / "new", save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed).items() >= trained.losses.items()
    assert folders(tmp_path / "new") == ["checkpoint-2", "checkpoint-4"]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "new/checkpoint-2").model_type == "gpt2"


def test_missing_folder_is_laid_again(trained):
    shutil.rmtree(trained.folder / "checkpoint-2")
    (trained.folder / "checkpoint-4/trainer_state.json").write_text("half")
    resumed = attached("gpt2", trained.folder, max_steps=4)
    resumed.train(resume_from_checkpoint=str(trained.folder / "checkpoint-2"))
    assert losses_of(resumed).items() >= trained.losses.items()
    resumed = attached("gpt2", trained.folder, max_steps=4)
    resumed.train(resume_from_checkpoint=trained.folder / "checkpoint-4")
    assert losses_of(resumed).items() >= trained.losses.items()


def test_pointer_without_a_checkpoint_falls_back_to_the_newest(trained, caplog):
    with ckstore.open(trained.folder / "ckstore") as store:
        store.delete(4)
    resumed = attached("gpt2", trained.folder, max_steps=4)
    resumed.train(resume_from_checkpoint=str(trained.folder / "checkpoint-4"))
    assert f"training resumes from {trained.folder / 'checkpoint-2'}" in caplog.text
    assert losses_of(resumed).items() >= trained.losses.items()
    assert steps(trained.folder) == [2, 4]


def test_pointer_is_settled_on_resume(trained):
    """The saver has published the checkpoint after its trainer was killed."""
    (trained.folder / "checkpoint-6").mkdir()
    trained.pointers.announce(6, trained.folder / "checkpoint-6/ckstore.json")
    with ckstore.open(trained.folder / "ckstore") as store:
        store.commit(store.restore(2), 6)
    assert read_pointer(trained.folder / "checkpoint-6").seq is None
    resumed = attached("gpt2", trained.folder, save_strategy="no")
    assert resumed._ckstore.folder_to_resume(True) == str(trained.folder / "checkpoint-6")
    assert read_pointer(trained.folder / "checkpoint-6").seq == 2
    resumed._ckstore.close(is_failing=False)


def test_rotation_that_a_crash_prevented(trained):
    os.utime(trained.folder / "checkpoint-4", (1, 1))
    resumed = attached("gpt2", trained.folder, save_total_limit=1)
    resumed._ckstore.folder_to_resume("seq:0")
    resumed._ckstore.settle()
    assert folders(trained.folder) == ["checkpoint-2", "checkpoint-4"]
    resumed._ckstore.folder_to_resume(True)
    resumed._ckstore.settle()
    assert folders(trained.folder) == ["checkpoint-4"]
    assert steps(trained.folder) == [4]
    resumed._ckstore.close(is_failing=False)


def test_replaced_checkpoint_is_deleted_on_resume(trained):
    """A crash came after the second save of a step, and before the first was deleted."""
    with ckstore.open(trained.folder / "ckstore") as store:
        store.commit(store.restore(2), 2)
        store.commit({"mine": 1}, 2)
    resumed = attached("gpt2", trained.folder, save_strategy="no")
    resumed._ckstore.folder_to_resume(True)
    resumed._ckstore.close(is_failing=False)
    with ckstore.open(trained.folder / "ckstore") as store:
        assert [(info.seq, info.step) for info in store.log()] == [(3, 2), (2, 2), (1, 4)]


def test_folder_that_never_became_durable_is_removed(trained, caplog):
    pointers = trained.pointers
    for step in (4, 6):
        (trained.folder / f"checkpoint-{step}").mkdir(exist_ok=True)
        pointers.announce(step, trained.folder / f"checkpoint-{step}/ckstore.json")
    (trained.folder / "checkpoint-8").mkdir()
    resumed = attached("gpt2", trained.folder, max_steps=4, save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    assert folders(trained.folder) == ["checkpoint-2", "checkpoint-4"]
    assert caplog.text.count("is removed") == 3
    assert losses_of(resumed).items() >= trained.losses.items()


def test_nothing_to_resume_from(tmp_path):
    plain, stored = make_trainer("gpt2", tmp_path), attached("gpt2", tmp_path)
    messages = []
    for trainer in (plain, stored):
        with pytest.raises(ValueError, match="No valid checkpoint found") as caught:
            trainer.train(resume_from_checkpoint=True)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        stored.train(resume_from_checkpoint="seq:1")


@pytest.mark.parametrize("wanted", ["seq:99", "no-such-tag", "best:accuracy"])
def test_reference_to_nothing_is_refused(trained, wanted):
    resumed = attached("gpt2", trained.folder, max_steps=4)
    with pytest.raises((NotFoundError, UsageError)):
        resumed.train(resume_from_checkpoint=wanted)


def test_checkpoint_that_no_trainer_saved_is_refused(trained):
    with ckstore.open(trained.folder / "ckstore") as store:
        store.commit({"model": torch.zeros(3)}, 9, tags=["mine"])
    resumed = attached("gpt2", trained.folder, max_steps=4)
    with pytest.raises(UsageError, match="not saved by a trainer"):
        resumed.train(resume_from_checkpoint="mine")
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed).items() >= trained.losses.items()


def test_run_of_transformers_continues_with_a_store(tmp_path):
    plain = make_trainer("gpt2", tmp_path, max_steps=4)
    plain.train()
    with_store = attached("gpt2", tmp_path, max_steps=6)
    with_store.train(resume_from_checkpoint=True)
    assert losses_of(with_store).items() >= losses_of(plain).items()
    assert steps(tmp_path) == [6]
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    again = attached("gpt2", tmp_path, max_steps=6)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses_of(again) == losses_of(with_store)


def test_another_model_is_refused(trained):
    resumed = attached("moe", trained.folder)
    before = {name: tensor.clone() for name, tensor in resumed.model.state_dict().items()}
    with pytest.raises(UsageError, match="model"):
        resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in resumed.model.state_dict().items())


def test_missing_adapter_is_refused(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed")
    attached("lora", tmp_path, max_steps=2).train()
    with ckstore.open(tmp_path / "ckstore") as store:
        paths = [row.path for row in store.contents("latest").tensors if row.path.startswith(("adapters", "model"))]
    assert paths
    assert all("lora" in path for path in paths)
    resumed = attached("lora", tmp_path, max_steps=2)
    resumed.model.delete_adapter("second")
    with pytest.raises(UsageError, match="second"):
        resumed.train(resume_from_checkpoint=True)
    with pytest.raises(UsageError, match="adapters"):
        attached("gpt2", tmp_path, max_steps=2).train(resume_from_checkpoint=True)


PARTS = ("optimizer", "scheduler", "scaler", "random")


def test_save_only_model(tmp_path, caplog):
    attached("gpt2", tmp_path, max_steps=2, save_only_model=True).train()
    with ckstore.open(tmp_path / "ckstore") as store:
        assert list(store.restore()) == ["model", "files", "output"]
    resumed = attached("gpt2", tmp_path, max_steps=4)
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu")
    resumed.train(resume_from_checkpoint=True)
    assert [part for part in PARTS if f"checkpoint-2 has no {part} state" in caplog.text] == list(PARTS)
    assert list(losses_of(resumed)) == [1, 2, 3, 4]


@pytest.mark.parametrize("missing", PARTS)
def test_part_that_a_checkpoint_lacks_is_reported(trained, caplog, missing):
    with ckstore.open(trained.folder / "ckstore") as store:
        state = store.restore()
        state.setdefault("scaler", torch.amp.GradScaler("cpu").state_dict())
        del state[missing]
        store.commit(state, 4)
    resumed = attached("gpt2", trained.folder, max_steps=4, save_strategy="no")
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu")
    resumed.train(resume_from_checkpoint=True)
    assert [part for part in PARTS if f"checkpoint-4 has no {part} state" in caplog.text] == [missing]


def test_save_model_by_hand_writes_weights(trained, tmp_path):
    trained.trainer.save_model(str(tmp_path / "model"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    expected = trained.trainer.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded.state_dict().items())


def test_both_kinds_of_files(tmp_path):
    trainer = attached("gpt2", tmp_path, files="both", max_steps=2)
    trainer.train()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    expected = trainer.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded.state_dict().items())
    with ckstore.open(tmp_path / "ckstore") as store:
        assert not [name for name in store.restore()["files"] if name.endswith("safetensors")]
    resumed = attached("gpt2", tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed).items() >= losses_of(trainer).items()


def test_weights_of_an_older_save_do_not_stay(tmp_path):
    attached("gpt2", tmp_path, files="both", max_steps=2).train()
    attached("gpt2", tmp_path, max_steps=2, learning_rate=1e-3).train()
    assert not (tmp_path / "checkpoint-2/model.safetensors").exists()


class Hub:
    """Records what is uploaded."""

    def __init__(self):
        self.uploads = []

    def create_repo(self, repo_id, **_):
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path, ignore_patterns=(), path_in_repo="", **_):
        from huggingface_hub.utils import filter_repo_objects

        root = Path(folder_path)
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        found = set(filter_repo_objects(names, ignore_patterns=list(ignore_patterns)))
        self.uploads.append((path_in_repo, found))
        return SimpleNamespace(done=lambda: True, result=lambda: None)


def test_uploads_have_weights_and_no_store(tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    options = {"push_to_hub": True, "hub_model_id": "me/model", "hub_strategy": "all_checkpoints", "hub_token": "x"}
    trainer = attached("gpt2", tmp_path, max_steps=2, **options)
    monkeypatch.setattr(trainer, "create_model_card", lambda **_: None)
    trainer.train()
    trainer.push_to_hub()
    assert [place for place, _ in hub.uploads] == ["", "checkpoint-2", ""]
    for place, names in hub.uploads:
        assert "model.safetensors" in names
        assert not [name for name in names if name.startswith(("ckstore", "_", "."))]
        expected = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} if place else set()
        assert names >= expected
    assert not (tmp_path / "_ckstore_push").exists()
    assert not (tmp_path / "checkpoint-2/model.safetensors").exists()
    assert transformers.trainer.hf_api() is hub


def test_attached_twice(tmp_path):
    trainer = make_trainer("gpt2", tmp_path)
    ckstore.transformers.attach(trainer, tmp_path / "mine")
    ckstore.transformers.attach(trainer, tmp_path / "mine")
    kind, callbacks = type(trainer), len(trainer.callback_handler.callbacks)
    ckstore.transformers.attach(trainer)
    assert (type(trainer), len(trainer.callback_handler.callbacks)) == (kind, callbacks)
    assert isinstance(trainer, transformers.Trainer)
    assert kind.__name__ == "Trainer"
    with pytest.raises(UsageError, match="attached to run main"):
        ckstore.transformers.attach(trainer, tmp_path / "elsewhere")


def test_attach_refuses_what_it_cannot_serve(tmp_path):
    with pytest.raises(UsageError, match="not a Trainer"):
        ckstore.transformers.attach("trainer")
    with pytest.raises(UsageError, match="files must be"):
        ckstore.transformers.attach(make_trainer("gpt2", tmp_path), files="stub")
    with pytest.raises(UsageError, match="save_steps"):
        ckstore.transformers.attach(make_trainer("gpt2", tmp_path, enable_jit_checkpoint=True))


def test_unknown_version_is_refused(tmp_path, monkeypatch):
    trainer = make_trainer("gpt2", tmp_path)
    monkeypatch.setattr(transformers.Trainer, "_save_scaler", lambda self, output_dir, more: None)
    with pytest.raises(UnsupportedError, match=r"_save_scaler has the parameters \(self, output_dir, more\)"):
        ckstore.transformers.attach(trainer)
    assert type(trainer) is transformers.Trainer


@pytest.mark.parametrize(
    ("name", "reason"), [("is_deepspeed_enabled", "DeepSpeed is on"), ("is_fsdp_enabled", "FSDP is on")]
)
def test_sharded_training_is_left_to_transformers(tmp_path, caplog, name, reason):
    trainer = make_trainer("gpt2", tmp_path)
    setattr(trainer, name, True)
    ckstore.transformers.attach(trainer)
    assert type(trainer) is transformers.Trainer
    assert reason in caplog.text


def test_lack_of_memory_shows_when_training_begins(tmp_path):
    trainer = attached("gpt2", tmp_path, background=True, policy=ckstore.Policy(arena_nbytes_max=4096))
    with pytest.raises(CapacityError, match="background=False"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert folders(tmp_path) == []


def test_failed_commit_leaves_no_folder(tmp_path, monkeypatch):
    trainer = attached("gpt2", tmp_path)

    def full(*_, **__):
        raise CapacityError("the disk is full")

    monkeypatch.setattr(ckstore.Store, "commit", full)
    with pytest.raises(CapacityError, match="full"):
        trainer.train()
    assert folders(tmp_path) == []


def test_folder_of_transformers_survives_a_failed_commit(tmp_path, monkeypatch):
    make_trainer("gpt2", tmp_path, max_steps=2).train()
    before = sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir())
    trainer = attached("gpt2", tmp_path, background=True, max_steps=2)

    def full(*_, **__):
        raise CapacityError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(ckstore.Store, "commit_async", full)
        with pytest.raises(CapacityError, match="full"):
            trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoint-2").iterdir()) == before
    attached("gpt2", tmp_path, background=True, max_steps=2).train()
    assert is_pointer(tmp_path / "checkpoint-2")
    assert not list(tmp_path.glob(".checkpoint-*"))


def test_run_of_another_output_directory_is_refused_before_training(tmp_path):
    store = tmp_path / "store"
    attached("gpt2", tmp_path / "first", store=store, max_steps=2).train()
    second = attached("gpt2", tmp_path / "second", store=store, max_steps=4)
    with pytest.raises(UsageError, match=r"another output directory.*run="):
        second.train()
    assert second.state.global_step == 0
    attached("gpt2", tmp_path / "third", store=store, save_strategy="no", max_steps=1).train()
    resumed = attached("gpt2", tmp_path / "first", store=store, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert folders(tmp_path / "first") == ["checkpoint-2", "checkpoint-4"]


def test_damaged_pointer_does_not_prevent_resuming(trained, caplog):
    file = trained.folder / "checkpoint-2/ckstore.json"
    file.write_text(file.read_text().replace("transformers", "Transformers"))
    resumed = attached("gpt2", trained.folder, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert f"{file} is damaged or was edited" in caplog.text
    assert losses_of(resumed).items() >= trained.losses.items()
    assert read_pointer(file).seq == 0


def test_files_of_a_malicious_store_stay_in_their_folder(trained):
    with ckstore.open(trained.folder / "ckstore") as store:
        state = store.restore()
        state["files"]["../../evil"] = b"x"
        store.commit(state, 6)
    resumed = attached("gpt2", trained.folder)
    with pytest.raises(ckstore.MalformedError, match="leads out of its folder"):
        resumed.train(resume_from_checkpoint=True)
    assert not list(trained.folder.parent.glob("evil"))
    assert not is_pointer(trained.folder / "checkpoint-6")
