"""The copies of Lightning that a process has loaded: ``lightning`` and ``pytorch_lightning``.

Each accepts plugins and callbacks of its own classes only. So what ckstore makes must belong to every copy.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ckstore.errors import UnsupportedError
from ckstore.integrations.signatures import check_signatures

TESTED = ("2.6.6",)
"""The versions of Lightning that the door was tested with."""

FABRIC = ("lightning.fabric", "lightning_fabric")
PYTORCH = ("lightning.pytorch", "pytorch_lightning")
_PLUGIN_METHODS = {
    "save_checkpoint": ("self", "checkpoint", "path", "storage_options"),
    "load_checkpoint": ("self", "path", "map_location", "weights_only"),
    "remove_checkpoint": ("self", "path"),
    "teardown": ("self",),
}
_CALLBACK_METHODS = {
    "on_fit_start": ("self", "trainer", "pl_module"),
    "on_train_start": ("self", "trainer", "pl_module"),
    "on_train_batch_end": ("self", "trainer", "pl_module", "outputs", "batch", "batch_idx"),
    "on_load_checkpoint": ("self", "trainer", "pl_module", "checkpoint"),
    "state_dict": ("self",),
    "load_state_dict": ("self", "state_dict"),
}


def loaded(names: Sequence[str]) -> list[ModuleType]:
    """Return the copies of Lightning that are loaded; if there is none, load what is installed.

    Raises:
        UnsupportedError: Lightning is not installed.
    """
    found = [name for name in names if name in sys.modules]
    if not found:
        found = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not found:
        raise UnsupportedError(
            "Lightning is not installed", todo=f"install it: pip install lightning=={TESTED[-1]}", library="lightning"
        )
    return [importlib.import_module(name) for name in found]


def part(library: ModuleType, name: str) -> ModuleType:
    """Return a module of a copy."""
    return importlib.import_module(f"{library.__name__}.{name}")


@functools.cache
def check(library: ModuleType) -> None:
    """Refuse a version of Lightning with other signatures than those known."""
    version, name = str(library.__version__), library.__name__
    if name in FABRIC:
        owner = part(library, "plugins.io.checkpoint_io").CheckpointIO
        check_signatures(owner, _PLUGIN_METHODS, library=name, version=version, tested=TESTED)
    else:
        owner = part(library, "callbacks").Callback
        check_signatures(owner, _CALLBACK_METHODS, library=name, version=version, tested=TESTED)


def torch_io() -> Any:
    """Return Lightning's own ``CheckpointIO``, for files that are not pointers."""
    return part(loaded(FABRIC)[0], "plugins.io.torch_io").TorchCheckpointIO()
