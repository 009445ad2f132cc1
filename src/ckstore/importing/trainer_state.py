"""What transformers' Trainer writes beside a checkpoint: its step, its metrics, and how it got there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ckstore.errors import CorruptError
from ckstore.importing.nature import check_nature

NBYTES_MAX = 256 << 20


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CorruptError: It is no JSON, or longer than can be.
    """
    check_nature(path, "json")
    if path.stat().st_size > NBYTES_MAX:
        raise CorruptError("the file is longer than can be", where=path)
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise CorruptError(f"the file is no JSON ({problem})"[:200], where=path) from None


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Return the content of a ``trainer_state.json``.

    Raises:
        CorruptError: It is no JSON, longer than can be, or holds no table.
    """
    state = read_json(path)
    if not isinstance(state, dict):
        raise CorruptError("the file holds no table", where=path)
    return state


def step_in(state: dict[str, Any]) -> int | None:
    """Return the step, or None."""
    step = state.get("global_step")
    return step if type(step) is int and step >= 0 else None


def metrics_in(state: dict[str, Any]) -> dict[str, float]:
    """Return what was logged at the checkpoint's own step: loss, eval_loss and the like."""
    found: dict[str, float] = {}
    log = state.get("log_history")
    for row in log if isinstance(log, list) else ():
        if not isinstance(row, dict) or row.get("step") != state.get("global_step"):
            continue
        for name, value in row.items():
            is_number = type(value) in (int, float) and math.isfinite(value)
            if is_number and ("loss" in name or name.startswith("eval_")) and ":" not in name and len(name) <= 128:
                found[name] = float(value)
    return found
