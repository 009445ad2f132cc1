"""Guards for optimizers: the memory that an optimizer owns, and the hook that makes its step wait for copies.

An optimizer owns its parameters and the tensors of its state. Only its step changes them, so they may be copied while
training continues. All other memory may change at any time and is never guarded. Optimizers with ``capturable`` are not
guarded either, because a CUDA graph may replay their steps without calling hooks. Optimizers are not kept alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import add, attrgetter, itemgetter
from typing import Any

import torch

from ckstore.background.copying import Span
from ckstore.errors import UsageError
from ckstore.state.optimizers import optimizer_levels
from ckstore.state.torch_adapter import PLAIN_KINDS, are_strided
from ckstore.state.torch_objects import is_dtensor

_NBYTES_OF, _VERSION_OF = attrgetter("nbytes"), attrgetter("_version")
_FIRST_OF = itemgetter(0)

_CALLS = "ckstore_calls"
"""Attribute of our hooks: a function that returns what the hook calls, or None if that is gone."""


class OptimizerGuard:
    """The attached optimizers of one store.

    Args:
        on_step: Called before each of their steps. A method does not keep its object alive.
    """

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = weakref.WeakMethod(on_step) if hasattr(on_step, "__self__") else lambda: on_step
        self._hooks: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        # Optimizers that own memory. A wrapper around an optimizer has hooks, but owns nothing.
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: tuple[list[Span], list[Span]] = [], []

    def attach(self, optimizer: object) -> None:
        """Guard the steps of an optimizer and of the wrappers around it. Attaching again does nothing.

        Raises:
            UsageError: This object cannot be guarded.
        """
        *wrappers, inner = optimizer_levels(optimizer)
        if not self._is_hooked(inner):
            if not callable(getattr(inner, "register_step_pre_hook", None)):
                raise UsageError(
                    f"a {type(optimizer).__name__} has no hooks before its steps, so it cannot be guarded",
                    todo="pass an optimizer of torch.optim, or do not attach it: then its tensors are copied before "
                    "commit_async returns",
                )
            try:
                self._hook(inner)
            except (AttributeError, TypeError) as error:
                raise UsageError(
                    f"a {type(optimizer).__name__} is not an initialized torch optimizer: {error}",
                    todo="call super().__init__() in its constructor, or do not attach it",
                ) from error
        self._owners.add(inner)
        for wrapper in wrappers:
            # A wrapper may change parameters before its inner optimizer steps. Most wrappers have no hooks.
            if callable(getattr(wrapper, "register_step_pre_hook", None)) and not self._is_hooked(wrapper):
                with contextlib.suppress(AttributeError, TypeError):
                    self._hook(wrapper, inner)

    def _hook(self, optimizer: Any, inner: Any = None) -> None:
        """Register hooks before and after the steps of an optimizer, unless they are those of the ``inner`` one.

        Raises:
            AttributeError: It lacks attributes of a torch optimizer. No hook is left behind.
            TypeError: It does not support weak references or hashing. No hook is left behind.
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
            # The hook after the step first: a step that is recorded as begun must be recorded as ended.
            handles.append(optimizer.register_step_post_hook(after_step))
            handles.append(optimizer.register_step_pre_hook(before_step))
            for handle, hook in zip(handles, (after_step, before_step), strict=True):
                _remove_left_hooks(handle.hooks_dict_ref())
                setattr(hook, _CALLS, reference)
            hooks = handles[-1].hooks_dict_ref()
            if inner is not None and hooks is self._hooks[inner][-1].hooks_dict_ref():
                raise AttributeError("it shares the hooks of its inner optimizer")
            if isinstance(hooks, OrderedDict):
                # Run ours first, because other hooks may change parameters.
                hooks.move_to_end(handles[-1].id, last=False)
            self._hooks[optimizer] = handles
        except BaseException:
            for handle in handles:
                handle.remove()
            raise

    def _is_hooked(self, optimizer: Any) -> bool:
        """Whether our hooks are registered. An optimizer loses its hooks if its ``__init__`` runs again."""
        try:
            handles = self._hooks.get(optimizer, [])
        except TypeError:
            return False
        return bool(handles) and all(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles)

    def spans(self) -> list[Span]:
        """Return the address ranges that the optimizers own now, ascending. Adjacent ranges are joined.

        Empty while an optimizer steps, because its guard has already let it change its memory. An optimizer whose step
        has failed counts as stepping until its next step has ended.
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
        """Remove all hooks."""
        for hooks in list(self._hooks.values()):
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self._owners.clear()
        self._stepping.clear()


def _remove_left_hooks(hooks: Any) -> None:
    """Remove the hooks of stores that no longer exist. Not done when a store goes, since a step may be running."""
    for number, hook in list(hooks.items()):
        calls = getattr(hook, _CALLS, None)
        if calls is not None and calls() is None:
            del hooks[number]


def versions_of(keeps: Sequence[Sequence[object]]) -> list[tuple[int, int]]:
    """Return for each storage the sum of its tensors' version counters, and its address.

    Fused operations do not increase version counters. Moving a storage into shared memory, or resizing it, changes no
    version but the address, and leaves the old memory to other tensors.

    Args:
        keeps: For each storage, the objects that keep its tensors alive.
    """
    try:
        # The fast path: nearly every storage has one tensor. The trainer waits for this.
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
    # Each object is a tuple of a tensor, or one that shares its version counter, and a torch storage.
    tensor = part[0] if isinstance(part, tuple) else None
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0


def _address_of(part: object) -> int:
    memory = part[-1] if isinstance(part, tuple) else None
    return memory.data_ptr() if isinstance(memory, torch.UntypedStorage) else 0


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
            elif isinstance(part, torch.Tensor) and is_dtensor(part):
                # The optimizers of FSDP2 and tensor parallelism own shards.
                plain.append(part._local_tensor)  # type: ignore[attr-defined]
        parts = within
    if not are_strided(plain):
        plain = [each for each in plain if are_strided((each,))]
    if not all(map(torch.Tensor.is_contiguous, plain)):
        plain = [each for each in plain if _is_dense(each)]
    starts = list(map(torch.Tensor.data_ptr, plain))
    spans = list(zip(starts, map(add, starts, map(_NBYTES_OF, plain)), strict=True))
    # Tensors without memory (meta tensors, freed storages) have address 0.
    return [span for span in spans if span[0]] if 0 in starts else spans


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory range without gaps, in any order of dimensions.

    Gaps may belong to other tensors, which may change at any time.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count != 1 and step != expected:
            return False
        expected *= count
    return True
