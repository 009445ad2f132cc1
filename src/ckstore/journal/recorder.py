"""What optimizers see at their steps: gradients and hyper-parameters, noted by hooks around each step.

A hook copies nothing. It keeps the gradients, their version counters and a sample of their words; ``take`` checks that
they have not changed since. torch makes new gradients for each backward unless they are zeroed in place, so that is the
usual case.

What the recorder cannot explain, it says: then the next commit stores the whole state, and the notes begin again there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import noop
from ckstore.errors import UsageError
from ckstore.format.tree import DictNode, ListNode, Node, TupleNode
from ckstore.journal.owned_memory import OwnedMemory, Sample, Sampler, strides_like
from ckstore.state.optimizers import optimizer_levels
from ckstore.state.values import encode_plain

DENSE, SPARSE = torch.strided, torch.sparse_coo


class GradientReference(NamedTuple):
    """A gradient that an optimizer saw, where it lies.

    Args:
        parameter: Index of its parameter, counted over all groups.
        tensor: The gradient, detached.
    """

    parameter: int
    tensor: Any

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        tensor = self.tensor._values() if self.tensor.is_sparse else self.tensor
        return int(tensor.nbytes)


class RecordedStep(NamedTuple):
    """One step.

    Args:
        optimizer: Index of the optimizer, in the order in which they were attached.
        groups: Hyper-parameters: a list of one mapping for each group.
        gradients: The gradients, in the order of the parameters.
        sample: What shows changes of them.
        seconds: Wall seconds that the step took.
    """

    optimizer: int
    groups: Node
    gradients: tuple[GradientReference, ...]
    sample: Sample
    seconds: float = 0.0


class _Attached:
    """An optimizer of the journal, and what is noted of it.

    Args:
        optimizer: The optimizer, which is not kept alive.
        index: Its number in the records.
    """

    def __init__(self, optimizer: Any, index: int) -> None:
        self.reference = weakref.ref(optimizer)
        self.index = index
        self.handles: list[Any] = []
        self.memory = OwnedMemory()
        self.sampler = Sampler()
        self.shapes: list[tuple[object, ...]] | None = None
        """Those of the last commit; None: there was none."""
        self.running: RecordedStep | None = None
        self.skipped: int | None = None
        """While a step runs that will change nothing: how many tensors the optimizer owns."""


class StepRecorder:
    """The steps of some optimizers since the last call of ``take``. Used on the thread that trains.

    Args:
        before_step: Called before each step. A method does not keep its object alive.
    """

    def __init__(self, before_step: Callable[[], None] = noop) -> None:
        self._before_step = weakref.WeakMethod(before_step) if hasattr(before_step, "__self__") else lambda: before_step
        self._attached: list[_Attached] = []
        self._steps: list[RecordedStep] = []
        self._problem: str | None = None
        self.is_paused = False
        """Whether steps are replayed, and therefore not noted."""

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, in the order in which they were attached.

        Raises:
            UsageError: One of them no longer exists.
        """
        found = [each.reference() for each in self._attached]
        if any(each is None for each in found):
            raise UsageError(
                "an optimizer of the journal no longer exists",
                todo="call store.journal with the optimizer that has taken its place",
            )
        return found

    def attach(self, optimizer: Any) -> None:
        """Note the steps of an optimizer from now on, in the place of one that no longer exists.

        Args:
            optimizer: The optimizer, or a wrapper around it.

        Raises:
            UsageError: It has no hooks, or is attached already.
        """
        inner = optimizer_levels(optimizer)[-1]
        if any(each.reference() is inner for each in self._attached):
            raise UsageError(
                f"this {type(inner).__name__} is in the journal already",
                todo="pass each optimizer to store.journal once",
            )
        attached = _Attached(inner, len(self._attached))
        self._hook(attached, inner)
        gone = [each.index for each in self._attached if each.reference() is None]
        if gone:
            # In its place, so that the order is the one in which a loop that starts again names them.
            attached.index = gone[0]
            self._attached[attached.index] = attached
            self._note("an optimizer was replaced by another one")
            return
        if any(each.shapes is not None for each in self._attached):
            self._note("an optimizer was added")
        self._attached.append(attached)

    def _hook(self, attached: _Attached, optimizer: Any) -> None:
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)

        def before_step(optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if (call := before()) is not None:
                call(attached, optimizer, arguments, options)

        def after_step(optimizer: Any, *_: object) -> None:
            if (call := after()) is not None:
                call(attached, optimizer)

        try:
            attached.handles.append(optimizer.register_step_pre_hook(before_step))
            attached.handles.append(optimizer.register_step_post_hook(after_step))
        except (AttributeError, TypeError) as error:
            for handle in attached.handles:
                handle.remove()
            raise UsageError(
                f"a {type(optimizer).__name__} has no hooks around its steps, so its steps cannot be noted: {error}",
                todo="pass an optimizer of torch.optim, or one that derives from torch.optim.Optimizer and calls "
                "super().__init__()",
            ) from error

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not note the steps that are replayed."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def release(self) -> None:
        """Remove all hooks."""
        for attached in self._attached:
            for handle in attached.handles:
                handle.remove()
        self._attached.clear()

    def take(self) -> tuple[tuple[RecordedStep, ...], str | None]:
        """Return the steps since the last call, and why they do not explain the state; None: they do.

        The state that is committed now is what the next steps begin with.
        """
        if any(each.running for each in self._attached):
            self._note("a step has begun and not ended; commit after the step")
        for attached, optimizer in zip(self._attached, self.optimizers, strict=True):
            self._check_untouched(attached, optimizer)
            attached.shapes = _shapes_of(optimizer)
            attached.running = attached.skipped = None
        if not all(step.sample.is_unchanged for step in self._steps):
            self._note(
                "a gradient was changed between the step and the commit; clear gradients with zero_grad(), which "
                "sets them to None, or commit first"
            )
        steps, problem = tuple(self._steps), self._problem
        self._steps, self._problem = [], None
        return steps, problem

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem
        # The whole state will be stored, so the gradients need not stay in memory.
        self._steps.clear()

    def _limit_memory(self) -> None:
        """Give the gradients up when they are larger than what they change: then the whole state is smaller.

        A loop that never commits would otherwise fill the memory with them.
        """
        optimizers = [found for each in self._attached if (found := each.reference()) is not None]
        if len(self._steps) <= len(optimizers):
            return
        nbytes = sum(gradient.nbytes for step in self._steps for gradient in step.gradients)
        if nbytes > sum(tensor.nbytes for optimizer in optimizers for tensor in owned_tensors(optimizer)):
            count = len(self._steps)
            self._note(
                f"the gradients of {count} steps since the last commit are larger than the state; commit more often"
            )

    def _before(self, attached: _Attached, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        wait = self._before_step()
        if wait is not None:
            wait()
        if self.is_paused or self._problem is not None:
            return
        # The first argument may be the optimizer itself.
        if any(each is not None and each is not optimizer for each in (*arguments, *options.values())):
            self._note(
                "the optimizer was stepped with a closure, which computes gradients inside the step; compute them "
                "before, and call step() without a closure"
            )
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            self._note(
                "the optimizer unscales gradients inside its step (a fused optimizer with a GradScaler); call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
            return
        self._check_untouched(attached, optimizer)
        if _is_skipped(optimizer):
            attached.skipped = len(owned_tensors(optimizer))
            return
        groups, gradients = _groups_of(optimizer), _gradients_of(optimizer)
        if groups is None:
            self._note("a hyper-parameter is neither a number nor a text; keep it outside of the groups")
        elif isinstance(gradients, str):
            self._note(gradients)
        else:
            parts = _parts_of([each.tensor for each in gradients])
            sample = attached.sampler.sample(parts)
            attached.running = RecordedStep(attached.index, groups, gradients, sample, SYSTEM_CLOCK.monotonic())

    def _after(self, attached: _Attached, optimizer: Any) -> None:
        step, count = attached.running, attached.skipped
        attached.running = attached.skipped = None
        if self.is_paused:
            return
        if count is not None:
            attached.memory.note(owned_tensors(optimizer))
            if attached.memory.tensor_count != count:
                self._note("an optimizer has made its state in a step that a GradScaler has skipped")
        if step is None:
            return
        if not _still_sees(optimizer, step):
            self._note("a gradient was replaced or changed inside the step; change it before the step")
            return
        self._steps.append(step._replace(seconds=SYSTEM_CLOCK.monotonic() - step.seconds))
        attached.memory.note(owned_tensors(optimizer))
        self._limit_memory()

    def _check_untouched(self, attached: _Attached, optimizer: Any) -> None:
        """Note a problem if what an optimizer owns has changed since its last step or the last commit."""
        has_changed = attached.memory.note(owned_tensors(optimizer))
        if attached.shapes is not None and attached.shapes != _shapes_of(optimizer):
            self._note("the groups or parameters of an optimizer have changed")
        elif has_changed:
            self._note("a parameter, or a tensor of an optimizer's state, was changed outside of a step")


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def owned_tensors(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer, and the tensors of its state, in a fixed order."""
    found: list[Any] = []
    for parameter in parameters_of(optimizer):
        found.append(parameter)
        found.extend(_tensors_in(optimizer.state.get(parameter, {})))
    return found


def _tensors_in(part: object) -> Iterable[Any]:
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from _tensors_in(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _tensors_in(value)


def _shapes_of(optimizer: Any) -> list[tuple[object, ...]]:
    return [
        (number, parameter.shape, parameter.dtype, parameter.requires_grad)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def _is_skipped(optimizer: Any) -> bool:
    """Whether a GradScaler has found infinite gradients, so that a fused optimizer will change nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def _groups_of(optimizer: Any) -> Node | None:
    """Return the hyper-parameters of all groups; None: some cannot be stored."""
    groups: list[Node] = []
    for group in optimizer.param_groups:
        names = [name for name in group if name != "params"]
        values = [node_of(group[name]) for name in names]
        if any(value is None for value in values):
            return None
        groups.append(DictNode("dict", tuple(names), tuple(value for value in values if value is not None)))
    return ListNode(tuple(groups))


def node_of(value: object) -> Node | None:
    """Return the node of a hyper-parameter; None: it can be neither stored nor set again."""
    if isinstance(value, torch.Tensor):
        # Optimizers with ``capturable`` take numbers as tensors. A replay writes the number into the live tensor.
        return encode_plain(value.item()) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        nodes = [node_of(each) for each in value]
        kind = TupleNode if isinstance(value, tuple) else ListNode
        return None if None in nodes else kind(tuple(each for each in nodes if each is not None))
    return encode_plain(value)


def _gradients_of(optimizer: Any) -> tuple[GradientReference, ...] | str:
    """Return the gradients of an optimizer, or why they cannot be noted."""
    found = []
    for number, parameter in enumerate(parameters_of(optimizer)):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout not in (DENSE, SPARSE) or gradient.is_complex():
            return "a gradient is neither dense nor in COO form, or is complex"
        if gradient.layout == DENSE and not _is_laid_out_like(gradient, parameter):
            # A fused optimizer pairs elements by their place in memory, and a replay gives gradients these strides.
            return "a gradient has other strides than its parameter; torch's backward gives it the same"
        found.append(GradientReference(number, gradient.detach()))
    return tuple(found)


def _is_laid_out_like(gradient: Any, parameter: Any) -> bool:
    """Whether a gradient has the strides that ``torch.empty_like(parameter)`` would have."""
    if gradient.is_contiguous() and parameter.is_contiguous():
        return True
    wanted = strides_like(parameter.shape, parameter.stride())
    strides = zip(gradient.shape, gradient.stride(), wanted, strict=True)
    return all(count == 1 or found == like for count, found, like in strides)


def _parts_of(gradients: Sequence[Any]) -> list[Any]:
    """Return the dense tensors that gradients consist of."""
    if all(gradient.layout == DENSE for gradient in gradients):
        return list(gradients)
    parts = [(each._indices(), each._values()) if each.layout == SPARSE else (each,) for each in gradients]
    return [part for pair in parts for part in pair]


def _still_sees(optimizer: Any, step: RecordedStep) -> bool:
    """Whether the gradients of an optimizer are those of a step, in the same memory."""
    now = [(number, each.grad) for number, each in enumerate(parameters_of(optimizer)) if each.grad is not None]
    if [number for number, _ in now] != [each.parameter for each in step.gradients]:
        return False
    gradients = [gradient for _, gradient in now]
    return step.sample.is_of(_parts_of(gradients)) and step.sample.is_unchanged
