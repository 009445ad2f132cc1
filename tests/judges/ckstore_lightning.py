"""A pytest plugin: Lightning's own tests save into a store of ckstore, and read from it.

``TorchCheckpointIO``, the default of every Trainer, gets the methods of ``ckstore.lightning.CheckpointIO``; and
``torch.load``, which many tests call themselves, reads pointers.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

import ckstore
from ckstore.integrations import lightning as door
from ckstore.integrations.pointers import is_pointer

_METHODS = ("save_checkpoint", "load_checkpoint", "remove_checkpoint")
_Own = type("TorchCheckpointIO", (CheckpointIO,), {name: vars(TorchCheckpointIO)[name] for name in _METHODS})
# Not under the folder of the tests: a test that serves a pointer by HTTP needs the absolute address of its store.
_folder = Path(tempfile.mkdtemp(prefix="ckstore-judge-", dir="/var/tmp"))
_number = itertools.count()
_plugins = weakref.WeakKeyDictionary()
_counts = dict.fromkeys((*_METHODS, "torch.load"), 0)


def _plugin_of(io):
    if io not in _plugins:
        # In the foreground, so that what is to be deleted is deleted before a save returns, as the tests expect.
        _plugins[io] = ckstore.lightning.CheckpointIO(_folder / f"store-{next(_number)}", background=False)
    return _plugins[io]


def _delegate(name):
    def call(self, *args, **options):
        if isinstance(options.get("storage_options"), str):
            # A test of what Lightning's own class refuses.
            return getattr(_Own(), name)(*args, **options)
        if name in _counts:
            _counts[name] += 1
        return getattr(_plugin_of(self), name)(*args, **options)

    return call


def _torch_load(own):
    def load(file, *args, **options):
        name = file if isinstance(file, (str, Path)) else getattr(file, "name", None)
        if isinstance(name, (str, Path)) and is_pointer(name):
            _counts["torch.load"] += 1
            for plugin in list(_plugins.values()):
                plugin.wait()
            return ckstore.lightning.load(name)
        return own(file, *args, **options)

    return load


def pytest_configure(config):
    """Replace the methods, once for the session."""
    door.torch_io = _Own
    for name in (*_METHODS, "teardown"):
        setattr(TorchCheckpointIO, name, _delegate(name))
    torch.load = _torch_load(torch.load)
    ckstore.lightning.install_loader()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown():
    """Close the stores of trainers that saved outside of ``fit`` and are gone, before threads are counted."""
    for _ in range(3):
        if any(thread.name.startswith("ckstore") for thread in threading.enumerate()):
            gc.collect()


def pytest_terminal_summary(terminalreporter):
    """Show that the tests have used a store."""
    calls = ", ".join(f"{count} {name}" for name, count in _counts.items())
    terminalreporter.write_line(f"Lightning {lightning.pytorch.__version__} through ckstore: {calls}")


def pytest_unconfigure(config):
    """Delete the stores."""
    for plugin in list(_plugins.values()):
        plugin.teardown()
    shutil.rmtree(_folder, ignore_errors=True)
