"""Doors that open when a framework is imported, and objects that are attached at their first call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest

from ckstore.config import is_name
from ckstore.integrations import launch


@pytest.fixture
def framework(tmp_path, monkeypatch):
    (tmp_path / "a_framework").mkdir()
    (tmp_path / "a_framework" / "__init__.py").write_text("")
    (tmp_path / "a_framework" / "trainer.py").write_text(
        "class Trainer:\n    def train(self, steps=1):\n        return ['trained', steps]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "a_framework.trainer"
    sys.meta_path[:] = before
    for name in ("a_framework.trainer", "a_framework"):
        sys.modules.pop(name, None)


@pytest.fixture
def seen(framework, monkeypatch):
    """Note the stores and objects that are attached; attach by a class in front, as the doors do."""
    seen = []

    def change(module, store):
        def attach(trainer, *_, **__):
            seen.append((type(trainer).__name__, store))
            if type(trainer).__name__ != "Attached":
                trainer.__class__ = type("Attached", (type(trainer),), {"train": train})

        def train(self, steps=1):
            return ["attached", *super(type(self), self).train(steps)]

        launch._before_calls(module.Trainer, ("train",), attach)

    monkeypatch.setattr(launch, "_CHANGES", {framework: change})
    return seen


def test_framework_is_changed_when_it_is_imported(framework, seen):
    launch.open_doors("s3://bucket/run")
    assert framework not in sys.modules
    trainer = importlib.import_module(framework).Trainer()
    assert trainer.train(3) == ["attached", "trained", 3]
    assert seen[0] == ("Trainer", "s3://bucket/run")
    assert trainer.train() == ["attached", "trained", 1]


def test_framework_that_is_there_already_is_changed(framework, seen):
    trainer = importlib.import_module(framework).Trainer()
    launch.open_doors(None)
    assert trainer.train(steps=2) == ["attached", "trained", 2]
    assert seen[0] == ("Trainer", None)


def test_framework_is_changed_after_a_script_has_looked_for_it(framework, seen):
    launch.open_doors("s")
    assert importlib.util.find_spec(framework) is not None
    assert importlib.import_module(framework).Trainer().train() == ["attached", "trained", 1]


def test_framework_that_is_loaded_again_is_changed_again(framework, seen):
    launch.open_doors("s")
    module = importlib.import_module(framework)
    assert importlib.reload(module).Trainer().train() == ["attached", "trained", 1]
    assert seen == [("Trainer", "s"), ("Attached", "s")]


def test_object_that_is_attached_is_left_alone():
    # There is no such door: importing it would fail.
    launch._attach("none", SimpleNamespace(_ckstore=object()), "s", "out")
    with pytest.raises(ModuleNotFoundError):
        launch._attach("none", SimpleNamespace(), "s", "out")


def test_each_folder_has_its_own_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [
        "out",
        "a/out",
        "b/out",
        "b/c/out",
        "b-c/out",
        ".",
        "/",
        "s3://b/out",
        "x" * 300,
        "v1..2/\u4e2d \udcff",
        "-/.a",
    ]
    runs = [launch.run_of(folder) for folder in folders]
    assert all(map(is_name, runs))
    assert len(set(runs)) == len(folders)
    assert runs[1].startswith("a-out-")
    assert launch.run_of(tmp_path / "a" / "." / "out/") == runs[1]


def test_run_of_a_folder_never_changes():
    assert launch.run_of("/scratch/llama/out") == "llama-out-75aa64a8"


@pytest.mark.parametrize(
    ("given", "project", "folder"),
    [
        ((("out/step_10",), {}), None, "out"),
        (((), {"output_dir": "out/epoch_3/"}), None, "out"),
        (((), {"input_dir": "out"}), None, "out"),
        ((("step_1",), {}), None, "."),
        ((("out/step_10",), {}), "project1", "project1"),
        (((), {}), None, "."),
    ],
)
def test_folder_of_an_accelerator(given, project, folder, monkeypatch):
    class Accelerator:
        project_dir = project

        def save_state(self, output_dir=None):
            pass

        def load_state(self, input_dir=None):
            pass

    runs = []
    monkeypatch.setattr(launch, "_attach", lambda door, owner, store, folder: runs.append(launch.run_of(folder)))
    launch._change_accelerate(SimpleNamespace(Accelerator=Accelerator), "s")
    positional, named = given
    (Accelerator().load_state if "input_dir" in named else Accelerator().save_state)(*positional, **named)
    assert runs == [launch.run_of(folder)]


def test_script_gets_its_own_arguments_and_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "helper.py").write_text("NAME = 'helper'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, helper\nprint(sys.argv[1:], helper.NAME, __name__)\n")
    monkeypatch.setattr(launch, "_CHANGES", {})
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    launch.main([str(script), "--store", "mine", "-m"])
    assert capsys.readouterr().out == "['--store', 'mine', '-m'] helper __main__\n"
    sys.modules.pop("helper")


def test_module_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_script.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch, "_CHANGES", {})
    monkeypatch.setattr(sys, "argv", [])
    launch.main(["-m", "a_script", "--steps", "3"])
    assert capsys.readouterr().out == "['--steps', '3'] __main__\n"


def test_help_names_the_default(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    assert "--store S" in capsys.readouterr().out
