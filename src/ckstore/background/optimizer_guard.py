"""Optimizers whose step waits for copies: the memory that they own, and the hook that guards it.

What an optimizer owns changes in its step and nowhere else: its parameters, and the tensors of its state. All
else may change at any time, so nothing else may be copied behind its guard. Nor may what an optimizer owns whose
steps a CUDA graph may replay (``capturable``): that calls no hooks, and counts no changes. Optimizers are not kept
alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import add, attrgetter, itemgetter
from typing import Any

import torch

from ckstore.errors import UsageError
from ckstore.state.torch_adapter import PLAIN_KINDS, are_strided

_NBYTES_OF, _VERSION_OF = attrgetter("nbytes"), attrgetter("_version")
_FIRST_OF = itemgetter(0)

_CALLS = "ckstore_calls"
"""Attribute of our hooks: returns what they call, or None once that is gone."""

Span = tuple[int, int]
"""The first address, and the one after the last."""


class OptimizerGuard:
    """The optimizers of one store.

    Args:
        on_step: Called before each of their steps; not kept alive where it is a method.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = weakref.WeakMethod(on_step) if hasattr(on_step, "__self__") else lambda: on_step
        self._hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        # Those that own something; a wrapper around one of them has hooks, and owns nothing by itself.
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: tuple[list[Span], list[Span]] = [], []

    def attach(self, optimizer: object) -> None:
        """Guard the steps of an optimizer from now on, those of what is wrapped around it too; again does nothing.

        Raises:
            UsageError: It is no optimizer that can be guarded.
        """
        *wrappers, inner = _levels(optimizer)
        if not self._is_hooked(inner):
            if not callable(getattr(inner, "register_step_pre_hook", None)):
                raise UsageError(
                    f"a {type(optimizer).__name__} cannot tell when it is going to step",
                    todo="give an optimizer of torch.optim, or leave it out: then its tensors are copied before the "
                    "call returns",
                )
            try:
                self._hook(inner)
            except (AttributeError, TypeError) as error:
                raise UsageError(
                    f"a {type(optimizer).__name__} was made without what makes an optimizer of torch: {error}",
                    todo="call super().__init__() in it, or leave it out: then its tensors are copied at once",
                ) from error
        self._owners.add(inner)
        for wrapper in wrappers:
            # A wrapper may change parameters before the optimizer in it steps. Most have no hooks.
            if callable(getattr(wrapper, "register_step_pre_hook", None)) and not self._is_hooked(wrapper):
                with contextlib.suppress(AttributeError, TypeError):
                    self._hook(wrapper, inner)

    def _hook(self, optimizer: Any, inner: Any = None) -> None:
        """Have an optimizer call before and after it steps; not one whose hooks are those of the ``inner`` one.

        Raises:
            AttributeError: It lacks what an optimizer of torch has; nothing is left behind.
            TypeError: It cannot be referred to weakly, or has no hash; nothing is left behind.
        """
        reference, stepping, itself = self._on_step, self._stepping, weakref.ref(optimizer)

        def before_step(*_: object) -> None:
            on_step, here = reference(), itself()
            if on_step is not None:
                on_step()
                if here is not None:
                    stepping.add(here)

        def after_step(*_: object) -> None:
            here = itself()
            if here is not None:
                stepping.discard(here)

        handles: list[Any] = []
        try:
            # In this order: a step that is said to begin must be said to end.
            handles.append(optimizer.register_step_post_hook(after_step))
            handles.append(optimizer.register_step_pre_hook(before_step))
            for handle, hook in zip(handles, (after_step, before_step), strict=True):
                _remove_left_hooks(handle.hooks_dict_ref())
                setattr(hook, _CALLS, reference)
            hooks = handles[-1].hooks_dict_ref()
            if inner is not None and hooks is self._hooks[inner][-1].hooks_dict_ref():
                raise AttributeError("its hooks are those of the optimizer in it")
            if isinstance(hooks, OrderedDict):
                # Other hooks may change parameters.
                hooks.move_to_end(handles[-1].id, last=False)
            self._hooks[optimizer] = handles
        except BaseException:
            for handle in handles:
                handle.remove()
            raise

    def _is_hooked(self, optimizer: Any) -> bool:
        """Whether an optimizer calls before it steps: one whose ``__init__`` ran again has forgotten to."""
        try:
            handles = self._hooks.get(optimizer, [])
        except TypeError:
            return False
        return bool(handles) and all(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles)

    def spans(self) -> list[Span]:
        """Return the memory that they own now, ascending; what touches is joined.

        None while one of them steps, as a closure may have it: its guard has let pass what it is about to change. One
        whose step has failed counts as stepping until its next one is done.
        """
        if self._stepping:
            return []
        found = [
            span
            for optimizer in list(self._owners)
            if self._is_hooked(optimizer) and not any(group.get("capturable") for group in optimizer.param_groups)
            for span in _spans_of(optimizer)
        ]
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
        for hooks in list(self._hooks.values()):
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self._owners.clear()
        self._stepping.clear()


def _remove_left_hooks(hooks: Any) -> None:
    """Remove the hooks of stores that were dropped; not when those are, which may be in the middle of a step."""
    for number, hook in list(hooks.items()):
        calls = getattr(hook, _CALLS, None)
        if calls is not None and calls() is None:
            del hooks[number]


def versions_of(keeps: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return how often torch has seen the tensors of each storage change, and where its memory lies.

    Args:
        keeps: What keeps the tensors of each storage alive.

    Fused operations are not counted. What is moved into shared memory, or resized, changes no value, and leaves to
    others the memory that is still to be copied.
    """
    try:
        # Nearly always each has one tensor, and a trainer waits for this.
        tensors: Sequence[Any]
        memories: Sequence[Any]
        tensors, memories = zip(*map(_FIRST_OF, keeps), strict=True)
        versions = list(zip(map(_VERSION_OF, tensors), map(torch.UntypedStorage.data_ptr, memories), strict=True))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return [_versions_of_parts(part) for part in keeps]
    if sum(map(len, keeps)) != len(keeps):
        for index, part in enumerate(keeps):
            if len(part) > 1:
                versions[index] = _versions_of_parts(part)
    return versions


def _versions_of_parts(parts: Sequence[object]) -> tuple[int, int]:
    return sum(map(_version_of, parts)), sum(map(_address_of, parts))


def _version_of(part: object) -> int:
    # What keeps a tensor of ours alive is the tensor, or one that shares its counter; and its storage.
    tensor = part[0] if isinstance(part, tuple) else None
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0


def _address_of(part: object) -> int:
    memory = part[-1] if isinstance(part, tuple) else None
    return memory.data_ptr() if isinstance(memory, torch.UntypedStorage) else 0


def _levels(optimizer: object) -> list[Any]:
    """Return an optimizer, the one that it is wrapped around, and so on; the last is the one that steps."""
    levels: list[Any] = [optimizer]
    while hasattr(levels[-1], "optimizer") and hasattr(levels[-1].optimizer, "param_groups"):
        if any(levels[-1].optimizer is level for level in levels):
            break
        levels.append(levels[-1].optimizer)
    if not (hasattr(levels[-1], "param_groups") and hasattr(levels[-1], "state")):
        raise UsageError(f"a {type(optimizer).__name__} is no optimizer: it has no parameters and no state")
    return levels


def _spans_of(optimizer: Any) -> list[Span]:
    plain: list[Any] = []
    parts: list[object] = [*(group["params"] for group in optimizer.param_groups), optimizer.state]
    while parts:
        within: list[object] = []
        for part in parts:
            if type(part) in PLAIN_KINDS:
                plain.append(part)
            elif isinstance(part, dict):
                within.extend(part.values())
            elif isinstance(part, (list, tuple)):
                within.extend(part)
        parts = within
    if not are_strided(plain):
        plain = [each for each in plain if are_strided((each,))]
    if not all(map(torch.Tensor.is_contiguous, plain)):
        plain = [each for each in plain if _is_dense(each)]
    starts = list(map(torch.Tensor.data_ptr, plain))
    spans = list(zip(starts, map(add, starts, map(_NBYTES_OF, plain)), strict=True))
    # At no address lies what has no memory: meta tensors, and storages that were let go of.
    return [span for span in spans if span[0]] if 0 in starts else spans


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
