"""Optimizers and the wrappers that frameworks put around them. Works without torch."""

from __future__ import annotations

from typing import Any

from ckstore.errors import UsageError


def optimizer_levels(optimizer: object) -> list[Any]:
    """Return an optimizer, its inner optimizer, and so on. The last one owns the memory."""
    levels: list[Any] = [optimizer]
    while hasattr(levels[-1], "optimizer") and hasattr(levels[-1].optimizer, "param_groups"):
        if any(levels[-1].optimizer is level for level in levels):
            break
        levels.append(levels[-1].optimizer)
    if not (hasattr(levels[-1], "param_groups") and hasattr(levels[-1], "state")):
        raise UsageError(
            f"a {type(optimizer).__name__} is not an optimizer: it has no param_groups or no state",
            todo="pass an optimizer of torch.optim, or a wrapper that has one as its attribute 'optimizer'",
        )
    return levels
