"""Doors that open when a framework is imported, and objects that are attached at their first call."""

from __future__ import annotations

import importlib
import sys

import pytest

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
        def attach(trainer):
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
