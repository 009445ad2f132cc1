"""ckstore: a compressed, incremental, content-addressed checkpoint store for PyTorch training.

Start with ``ckstore.open(path)``, which returns a ``Store``. Its ``commit``, ``commit_async`` and ``restore`` are in
``api.py``; ``Policy`` in ``config.py`` has every setting.

Names are imported on first use, so that ``ckstore ls`` loads neither numpy nor torch.
"""

# ``typing`` is not imported, which takes as long as half of Python's start. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckstore import accelerate as accelerate
    from ckstore import dcp as dcp
    from ckstore import transformers as transformers
    from ckstore.api import Store
    from ckstore.background.pending import Pending
    from ckstore.config import (
        DemotePolicy,
        FirstMomentSettings,
        LowRank,
        Policy,
        RepackPolicy,
        Residual,
        SecondMomentSettings,
        TensorSettings,
        WeightSettings,
    )
    from ckstore.errors import (
        BackendError,
        BoundError,
        CapacityError,
        ChecksumError,
        CkstoreError,
        ConflictError,
        CorruptError,
        LeafTypeError,
        LockHeldError,
        MalformedError,
        MissingChunkError,
        NotFoundError,
        RankError,
        SaverError,
        UnreachableError,
        UnsupportedError,
        UsageError,
    )
    from ckstore.interval import Advice, AutoInterval
    from ckstore.journal.clipping import clip_grad_norm_
    from ckstore.opening import open
    from ckstore.ops.gc.policy import Retention
    from ckstore.ops.repair import repair_store
    from ckstore.ranks.world import Ranks
    from ckstore.results import Info, Receipt
    from ckstore.state.markers import PerRank, PerRankValues, Replicated
    from ckstore.state.named_types import StandIn
    from ckstore.state.train_state import TrainState
    from ckstore.state.values import register_converter


__version__ = "0.1.0"

_MODULE_OF = {
    "Retention": "ops.gc.policy",
    "Store": "api",
    "open": "opening",
    "Ranks": "ranks.world",
    "Advice": "interval",
    "AutoInterval": "interval",
    "Pending": "background.pending",
    "DemotePolicy": "config",
    "Policy": "config",
    "RepackPolicy": "config",
    "Info": "results",
    "Receipt": "results",
    **dict.fromkeys(
        (
            "FirstMomentSettings",
            "LowRank",
            "Residual",
            "SecondMomentSettings",
            "TensorSettings",
            "WeightSettings",
        ),
        "config",
    ),
    **dict.fromkeys(("PerRank", "PerRankValues", "Replicated"), "state.markers"),
    "StandIn": "state.named_types",
    "TrainState": "state.train_state",
    "clip_grad_norm_": "journal.clipping",
    "register_converter": "state.values",
    "repair_store": "ops.repair",
    **dict.fromkeys(
        (
            "BackendError",
            "BoundError",
            "CapacityError",
            "ChecksumError",
            "CkstoreError",
            "ConflictError",
            "CorruptError",
            "LeafTypeError",
            "LockHeldError",
            "MalformedError",
            "MissingChunkError",
            "NotFoundError",
            "RankError",
            "SaverError",
            "UnreachableError",
            "UnsupportedError",
            "UsageError",
        ),
        "errors",
    ),
}

__all__ = [
    "Advice",
    "AutoInterval",
    "BackendError",
    "BoundError",
    "CapacityError",
    "ChecksumError",
    "CkstoreError",
    "ConflictError",
    "CorruptError",
    "DemotePolicy",
    "FirstMomentSettings",
    "Info",
    "LeafTypeError",
    "LockHeldError",
    "LowRank",
    "MalformedError",
    "MissingChunkError",
    "NotFoundError",
    "Pending",
    "PerRank",
    "PerRankValues",
    "Policy",
    "RankError",
    "Ranks",
    "Receipt",
    "RepackPolicy",
    "Replicated",
    "Residual",
    "Retention",
    "SaverError",
    "SecondMomentSettings",
    "StandIn",
    "Store",
    "TensorSettings",
    "TrainState",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "WeightSettings",
    "clip_grad_norm_",
    "open",
    "register_converter",
    "repair_store",
]


_DOORS = ("accelerate", "dcp", "lightning", "transformers")
"""Modules for frameworks, which are imported only when they are used."""


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _DOORS:
            try:
                return import_module(f"ckstore.{name}")
            except ModuleNotFoundError as error:
                # hasattr is to say False.
                what = f"ckstore.{name} needs a package that is not installed: {error.name}"
                raise AttributeError(what) from error
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'ckstore' has no attribute {name!r}")
        found = getattr(import_module(f"ckstore.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found


del TYPE_CHECKING


def __dir__() -> list[str]:
    # A door is shown once it is imported: a prompt that completes `ckstore.` reads all that is shown.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") or name in _DOORS)})
