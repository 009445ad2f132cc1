"""States through memory and back: capture, bytes, restore, without a store.

Invariants:
- ``difference`` compares bits and types: NaN equals NaN of the same payload, 0.0 differs from -0.0.
- Torch is used only if another module has imported it.
"""

from __future__ import annotations

import argparse
import dataclasses
import struct
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckstore.format.tensors import StorageSpec, TensorSpec
from ckstore.format.tree import Node
from ckstore.state.capture import Captured, capture
from ckstore.state.placement import RestoreTargets, prepare_restore
from ckstore.state.tensors import LeafAdapter


@dataclass(frozen=True, slots=True)
class CopiedState:
    """A captured state whose bytes were copied, as a store would."""

    tree: Node
    tensors: list[TensorSpec]
    storages: list[StorageSpec]
    contents: list[bytes]

    @staticmethod
    def of(captured: Captured) -> CopiedState:
        """Copy the bytes, in two reads where there are enough of them."""
        contents = []
        for storage in captured.storages:
            middle = storage.nbytes // 2
            contents.append(bytes(storage.read(0, middle)) + bytes(storage.read(middle, storage.nbytes)))
        specs = [StorageSpec(held.nbytes, held.element_width, held.is_float, ()) for held in captured.storages]
        return CopiedState(captured.tree, captured.tensors, specs, contents)

    def place(
        self,
        *,
        into: object = None,
        only: str | Sequence[str] | None = None,
        device: object = None,
        adapters: Sequence[LeafAdapter] = (),
    ) -> RestoreTargets:
        """Prepare a restore of it."""
        return prepare_restore(
            self.tree, self.tensors, self.storages, into=into, only=only, device=device, adapters=adapters
        )

    def fill(self, placement: RestoreTargets) -> Any:
        """Do the restore, last storage first."""
        for storage in reversed(placement.storages):
            placement.destination(storage)[:] = self.contents[storage]
            placement.complete(storage)
        return placement.finish()


def round_trip(
    state: object,
    *,
    into: object = None,
    only: str | Sequence[str] | None = None,
    device: object = None,
    adapters: Sequence[LeafAdapter] = (),
) -> Any:
    """Take a state apart, copy its bytes, and restore it."""
    kept = CopiedState.of(capture(state, adapters))
    return kept.fill(kept.place(into=into, only=only, device=device, adapters=adapters))


def difference(one: Any, other: Any, path: str = "state") -> str | None:
    """Return in words the first difference of two states in type, order or bits; None: there is none."""
    if type(one) is not type(other):
        return f"{path}: {type(one)} is not {type(other)}"
    if isinstance(one, dict):
        return _dict_difference(one, other, path)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{path}: {len(one)} items are not {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        return _first(difference(here, there, f"{path}.{index}") for index, (here, there) in pairs)
    parts = _parts_of(one), _parts_of(other)
    if parts[0] is not None:
        return difference(*parts, path)
    if isinstance(one, np.ndarray):
        is_same = (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        return None if is_same and _elements(one) == _elements(other) else f"{path}: arrays differ"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(one, torch.Tensor):
        return _tensor_difference(torch, one, other, path) or difference(vars(one), vars(other), f"{path}.__dict__")
    return None if _bits_of(one) == _bits_of(other) else f"{path}: {one!r} is not {other!r}"


def _parts_of(item: Any) -> Any:
    """Return what a container or object of Python's own holds; None: it is something else."""
    if isinstance(item, deque):
        return [list(item), item.maxlen]
    if isinstance(item, SimpleNamespace | argparse.Namespace):
        return vars(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    is_generator = type(item).__qualname__ == "Generator" and hasattr(item, "get_state")
    return [str(item.device), item.get_state()] if is_generator else None


def _dict_difference(one: dict[Any, Any], other: dict[Any, Any], path: str) -> str | None:
    if [(type(key), key) for key in one] != [(type(key), key) for key in other]:
        return f"{path}: keys {list(one)} are not {list(other)}"
    if getattr(one, "default_factory", None) is not getattr(other, "default_factory", None):
        return f"{path}: default factories differ"
    if isinstance(one, OrderedDict) and vars(one) != vars(other):
        return f"{path}: metadata differ"
    return _first(difference(one[key], other[key], f"{path}.{key}") for key in one)


def _first(found: Any) -> str | None:
    return next((text for text in found if text is not None), None)


def _elements(array: Any) -> bytes:
    content: bytes = array.tobytes()
    return content


def _tensor_difference(torch: Any, one: Any, other: Any, path: str) -> str | None:
    def traits(tensor: Any) -> tuple[object, ...]:
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.device

    if traits(one) != traits(other):
        return f"{path}: {traits(one)} is not {traits(other)}"
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(one.dtype.itemsize)
    here, there = one.detach().resolve_conj().resolve_neg(), other.detach()
    if words is None:
        here, there, words = torch.view_as_real(here), torch.view_as_real(there), torch.int64
    return None if torch.equal(here.view(words).cpu(), there.view(words).cpu()) else f"{path}: tensors differ"


def _bits_of(value: object) -> object:
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, Decimal):
        # A signalling NaN cannot be compared.
        return str(value)
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value
