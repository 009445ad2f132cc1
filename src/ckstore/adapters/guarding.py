"""Optimizers whose step waits for copies: the memory that they own, and the hook that guards it.

What an optimizer owns changes in its step and nowhere else: its parameters, and the tensors of its state. All
else may change at any time, so nothing else may be copied behind its guard. Optimizers are not kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from ckstore.adapters.torch_state import LAYOUT_OF, PLAIN_KINDS, PLAIN_LAYOUTS
from ckstore.errors import UsageError

_NBYTES_OF, _VERSION_OF = attrgetter("nbytes"), attrgetter("_version")

Span = tuple[int, int]
"""The first address, and the one after the last."""


class Guarded:
    """The optimizers of one store.

    Args:
        on_step: Called before each of their steps; not kept alive where it is a method.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = weakref.WeakMethod(on_step) if hasattr(on_step, "__self__") else lambda: on_step
        self._hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._last: tuple[list[Span], list[Span]] = [], []

    def attach(self, optimizer: object) -> None:
        """Guard the steps of an optimizer from now on; once more does nothing.

        Raises:
            UsageError: It is no optimizer that can be guarded.
        """
        inner = _innermost(optimizer)
        if inner in self._hooks:
            return
        if not callable(getattr(inner, "register_step_pre_hook", None)):
            raise UsageError(
                f"a {type(optimizer).__name__} cannot tell when it is going to step",
                todo="give an optimizer of torch.optim, or leave it out: then its tensors are copied before the call "
                "returns",
            )
        reference = self._on_step

        def before_step(*_: object) -> None:
            on_step = reference()
            if on_step is not None:
                on_step()

        try:
            self._hooks[inner] = inner.register_step_pre_hook(before_step)
        except AttributeError as error:
            raise UsageError(
                f"a {type(optimizer).__name__} was made without what makes an optimizer of torch: {error}",
                todo="call super().__init__() in it, or leave it out: then its tensors are copied at once",
            ) from error

    def spans(self) -> list[Span]:
        """Return the memory that they own now, ascending; what touches is joined."""
        found = [span for optimizer in list(self._hooks) for span in _spans_of(optimizer)]
        if found == self._last[0]:
            return self._last[1]
        joined: list[Span] = []
        for start, end in sorted(set(found)):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        self._last = found, joined
        return joined

    def release(self) -> None:
        """Guard nothing any more."""
        for hook in list(self._hooks.values()):
            hook.remove()
        self._hooks.clear()


def versions_of(storages: Sequence[object]) -> list[int]:
    """Return how often torch has seen the tensors of each storage change; fused operations it does not count."""
    parts: list[Any] = [getattr(storage, "keep", ()) for storage in storages]
    try:
        # Nearly always each has one tensor, and a trainer waits for this.
        return list(map(_VERSION_OF, [tensor for ((tensor, _),) in parts]))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return [sum(map(_version_of, each)) for each in parts]


def _version_of(part: object) -> int:
    # What keeps a tensor of ours alive is the tensor, or one that shares its counter; and its storage.
    tensor = part[0] if isinstance(part, tuple) else None
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0


def _innermost(optimizer: object) -> Any:
    """Return the optimizer that steps, where another one is wrapped around it."""
    inner: Any = optimizer
    while hasattr(inner, "optimizer") and hasattr(inner.optimizer, "param_groups"):
        inner = inner.optimizer
    if not (hasattr(inner, "param_groups") and hasattr(inner, "state")):
        raise UsageError(f"a {type(optimizer).__name__} is no optimizer: it has no parameters and no state")
    return inner


def _spans_of(optimizer: Any) -> list[Span]:
    tensors: list[torch.Tensor] = []
    parts: list[object] = [*(group["params"] for group in optimizer.param_groups), optimizer.state]
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, dict):
            parts.extend(part.values())
        elif isinstance(part, (list, tuple)):
            parts.extend(part)
    plain = tensors
    if not (PLAIN_KINDS.issuperset(map(type, tensors)) and PLAIN_LAYOUTS.issuperset(map(LAYOUT_OF, tensors))):
        plain = [each for each in tensors if type(each) in PLAIN_KINDS and LAYOUT_OF(each) in PLAIN_LAYOUTS]
    if not all(map(torch.Tensor.is_contiguous, plain)):
        plain = [each for each in plain if _is_dense(each)]
    starts = list(map(torch.Tensor.data_ptr, plain))
    return [(start, start + nbytes) for start, nbytes in zip(starts, map(_NBYTES_OF, plain), strict=True)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has every element between its first and its last, each once, in whatever order.

    Between the elements of another one lie those of somebody else, who may change them at any time.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and step != expected:
            return False
        expected *= count
    return True
