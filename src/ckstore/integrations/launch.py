"""Open the doors for a script that knows nothing of ckstore: ``python -m ckstore.run script.py``.

A framework is changed right after the script imports it, so a script pays for no framework that it does not use.
"""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ckstore.hashing import digest_of

_log = logging.getLogger("ckstore")


def open_doors(store: str | None) -> None:
    """Let every trainer and accelerator that is made from now on save into a store.

    Args:
        store: Folder or URL of the store; each folder that a framework saves to gets a run of its own in it. None: the
            default of each door, in the folder that the framework saves to.
    """
    for module_name, change in _CHANGES.items():
        if module_name in sys.modules:
            change(sys.modules[module_name], store)
        else:
            sys.meta_path.insert(0, _AfterImport(module_name, functools.partial(change, store=store)))


class _AfterImport(MetaPathFinder):
    """Calls a function with a module right after each time that it is loaded.

    It stays installed: a spec can be asked for without being loaded, and a module can be loaded again.
    """

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self._call)
        return spec


class _Calling(Loader):
    """A loader that calls a function with the module that it has loaded."""

    def __init__(self, loader: Any, call: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _change_accelerate(module: ModuleType, store: str | None) -> None:
    def attach(self: Any, given: Any = None, *_: Any, output_dir: Any = None, input_dir: Any = None, **__: Any) -> None:
        folder = Path(given or output_dir or input_dir or ".")
        if folder.name[-1:].isdigit():
            # One of many, such as step_10.
            folder = folder.parent
        _attach("accelerate", self, store, self.project_dir or folder)

    _before_calls(module.Accelerator, ("save_state", "load_state"), attach)


def _change_transformers(module: ModuleType, store: str | None) -> None:
    def attach(self: Any, *_: Any, **__: Any) -> None:
        _attach("transformers", self, store, self.args.output_dir)

    _before_calls(module.Trainer, ("train",), attach)


def _change_lightning(module: ModuleType, store: str | None) -> None:
    original = module.Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        own = self.strategy.checkpoint_io
        is_sharded = type(self.strategy).__name__ in _SHARDED
        exact_resume = importlib.import_module("ckstore.integrations.exact_resume")
        if not is_sharded and exact_resume.plugin_of(self) is not None:
            return
        if is_sharded or type(own).__name__ != "TorchCheckpointIO":
            _log.warning("%s with %s saves without ckstore", type(self.strategy).__name__, type(own).__name__)
            return
        folder = self.default_root_dir
        place = _place(store, folder) or {"store": str(Path(folder) / "ckstore")}
        self.strategy.checkpoint_io = exact_resume.CheckpointIO(**place)
        if not any(isinstance(each, exact_resume.ExactResume) for each in self.callbacks):
            self.callbacks.append(exact_resume.ExactResume())

    module.Trainer.__init__ = init


def _attach(door: str, owner: Any, store: str | None, folder: str | os.PathLike[str]) -> None:
    """Attach a trainer or accelerator, unless it was attached before, by the script itself or here."""
    if getattr(owner, "_ckstore", None) is None:
        importlib.import_module(f"ckstore.integrations.{door}").attach(owner, **_place(store, folder))


def _place(store: str | None, folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the arguments of a door: the store, and the run for what is saved to a folder."""
    return {} if store is None else {"store": store, "run": run_of(folder)}


def run_of(folder: str | os.PathLike[str]) -> str:
    """Return the name of the run for what is saved to a folder or URL, such as ``llama-out-75aa64a8``.

    It depends only on the absolute path: a script that is started again continues its run, also on another machine.
    """
    given = os.fspath(folder)
    # Links are kept: they lead to other places on other machines.
    place = given if "://" in given else os.path.abspath(given)  # noqa: PTH100
    last_two = "-".join(Path(place).parts[-2:])
    readable = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", last_two)[-64:]
    return f"{readable}-{digest_of(place.encode(errors='surrogateescape')).hex()[:8]}".lstrip("._-")


_CHANGES = {
    "accelerate.accelerator": _change_accelerate,
    "transformers.trainer": _change_transformers,
    "lightning.pytorch.trainer.trainer": _change_lightning,
    "pytorch_lightning.trainer.trainer": _change_lightning,
}
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")
"""Strategies of Lightning that save sharded states by themselves."""


def _before_calls(kind: type, names: Sequence[str], attach: Callable[..., None]) -> None:
    """Let the first call of a method attach its object, and then call the method that the object has.

    ``attach`` gets the arguments of the call.
    """
    for name in names:
        original = getattr(kind, name)

        def call(self: Any, *args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            before = type(self)
            attach(self, *args, **options)
            # A class that was attached has the method in front of this one, which calls this one again.
            chosen = _original.__get__(self) if type(self) is before else getattr(self, _name)
            return chosen(*args, **options)

        call.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(kind, name, call)


def main(arguments: Sequence[str]) -> None:
    """Run a script or module with the doors open; ``arguments`` as on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ckstore.run",
        description="Run a training script whose Trainer or Accelerator saves into a ckstore store, without a changed "
        "line.",
    )
    parser.add_argument(
        "--store",
        metavar="S",
        help="folder or URL of the store; what is saved to one output folder is one run in it, named after the folder "
        "and a hash of its absolute path [default: ckstore, in the output folder, run main]",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    given = parser.parse_args(arguments)
    open_doors(given.store)
    sys.argv = [given.script, *given.arguments]
    if given.is_module:
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.script).resolve().parent)
        runpy.run_path(given.script, run_name="__main__")
