"""A pytest plugin: every ``Trainer`` of transformers' own tests saves into a store, and resumes from it.

Many tests open weight files, so these are written as well. Others only ask whether there are files of optimizer and
scheduler: these are empty, so that a resume that does not read the store fails.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import transformers

from ckstore.integrations import launch
from ckstore.integrations import transformers as door

_folder = Path(tempfile.mkdtemp(prefix="ckstore-judge-"))
_number = itertools.count()
# Outside of the folders that the trainers save to, because tests count what is in there.
_stores: dict[Path, Path] = defaultdict(lambda: _folder / f"store-{next(_number)}")
_METHODS = ("_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_best_model")
_counts = dict.fromkeys(_METHODS, 0)


def _attach(own):
    def attach(trainer, store):
        # In the foreground, so that older folders are deleted before a save returns, as the tests expect.
        own(trainer, _stores[Path(trainer.args.output_dir).resolve()], background=False, files="both")

    return attach


def _counted(name, own):
    def call(self, *args, **options):
        _counts[name] += 1
        return own(self, *args, **options)

    return call


def _save_optimizer_and_scheduler(own):
    def save(self, output_dir):
        own(self, output_dir)
        if self._ckstore.draft is not None:
            for name in ("optimizer.pt", "scheduler.pt"):
                Path(output_dir, name).touch()

    return save


def pytest_configure(config):
    """Let ``train`` attach the trainer."""
    door.attach = _attach(door.attach)
    kind = door._StoreTrainer
    for name in _METHODS:
        setattr(kind, name, _counted(name, getattr(kind, name)))
    kind._save_optimizer_and_scheduler = _save_optimizer_and_scheduler(kind._save_optimizer_and_scheduler)
    launch.open_doors(None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """Show that the tests have used a store."""
    calls = ", ".join(f"{count} {name}" for name, count in _counts.items())
    terminalreporter.write_line(f"transformers {transformers.__version__} through ckstore: {calls}")


def pytest_unconfigure(config):
    """Delete the stores."""
    shutil.rmtree(_folder, ignore_errors=True)
