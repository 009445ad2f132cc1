"""ckstore: a compressed, incremental, content-addressed checkpoint store for PyTorch training.

Names are resolved on first use, so that ``ckstore ls`` loads neither numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.advice import Advice
    from ckstore.api import Store, open
    from ckstore.config import DemotePolicy, Policy, RepackPolicy
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
        SaverError,
        UnreachableError,
        UnsupportedError,
        UsageError,
    )
    from ckstore.info import Info
    from ckstore.interval import AutoInterval
    from ckstore.named_types import StandIn
    from ckstore.pending import Pending
    from ckstore.quant.settings import (
        FirstMomentSettings,
        LowRank,
        Residual,
        SecondMomentSettings,
        TensorSettings,
        WeightSettings,
    )
    from ckstore.receipt import Receipt
    from ckstore.retention.policy import Retention
    from ckstore.train_state import TrainState
    from ckstore.values import register_converter

__version__ = "0.1.0"

_MODULE_OF = {
    "Retention": "retention.policy",
    "Store": "api",
    "open": "api",
    "Advice": "advice",
    "AutoInterval": "interval",
    "Pending": "pending",
    "DemotePolicy": "config",
    "Policy": "config",
    "RepackPolicy": "config",
    "Info": "info",
    "Receipt": "receipt",
    **dict.fromkeys(
        (
            "FirstMomentSettings",
            "LowRank",
            "Residual",
            "SecondMomentSettings",
            "TensorSettings",
            "WeightSettings",
        ),
        "quant.settings",
    ),
    "StandIn": "named_types",
    "TrainState": "train_state",
    "register_converter": "values",
    "repair_store": "api",
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
    "Policy",
    "Receipt",
    "RepackPolicy",
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
    "open",
    "register_converter",
    "repair_store",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ckstore' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"ckstore.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
