"""Torch leaves: tensors of every dtype as spans of bytes, and dtypes, devices and sizes as plain values.

Invariants:
- Tensors are built from bytes and strides only; torch never converts or computes an element.
- Names from disk are looked up in tables, never in torch's namespace.
- Conjugate and negative views are stored resolved: with their values, without the lazy bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.autograd.graph import increment_version

from ckstore.errors import BackendError, CapacityError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec, count_of, extent_of
from ckstore.format.tiles import Box, views_of
from ckstore.format.tree import BUILT_IN
from ckstore.state.markers import OPEN_WITH_RANKS
from ckstore.state.named_types import StandIn
from ckstore.state.tensors import KnownObject, LeafBatch, LocalPart, Memory, TensorLeaf
from ckstore.state.torch_objects import is_dtensor, is_sharded_tensor, known_object
from ckstore.state.values import leaf_type_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckstore.format.tree import Path, Value


_QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


def _list_dtypes() -> dict[str, torch.dtype]:
    found = {name_of(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {name: dtype for name, dtype in sorted(found.items()) if name not in _QUANTIZED}


def name_of(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is stored, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


DTYPES = _list_dtypes()
"""Every dtype that can be stored, by name: all except the quantized ones."""

_COPY_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _DtypeFacts:
    """Facts shared by all tensors of a dtype, computed once."""

    name: str
    itemsize: int
    element_width: int
    is_float: bool

    @classmethod
    def of(cls, dtype: torch.dtype) -> _DtypeFacts:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        is_float = dtype.is_floating_point or dtype.is_complex
        return cls(name_of(dtype), dtype.itemsize, width if width in (1, 2, 4, 8) else 1, is_float)


_FACTS = {dtype: _DtypeFacts.of(dtype) for dtype in DTYPES.values()}


PLAIN_KINDS = frozenset((torch.Tensor, torch.nn.Parameter))
_LAYOUT_OF, _IS_NESTED = attrgetter("layout"), attrgetter("is_nested")
_FACTS_OF = attrgetter("dtype", "shape", "requires_grad")
_FIRST_OF, _LAST_OF = itemgetter(0), itemgetter(-1)
_IS_LEAF_OF, _ATTRIBUTES_OF = attrgetter("is_leaf"), attrgetter("__dict__")


class TorchAdapter:
    """Plain tensors and parameters on any device that has addresses."""

    library = "torch"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor; refuse tensors without plain strided memory."""
        if not isinstance(leaf, torch.Tensor):
            return None
        why = _why_not_storable(leaf)
        if why is not None:
            raise leaf_type_error(leaf, path, why, _advice_for(leaf))
        plain = leaf.detach()
        is_lazy = plain.is_conj() or plain.is_neg()
        if is_lazy:
            plain = plain.resolve_conj().resolve_neg()
        try:
            memory, origin = _memory_of(plain)
        except (RuntimeError, NotImplementedError):
            raise leaf_type_error(leaf, path, "it has no storage") from None
        if memory.nbytes and memory.start + memory.nbytes > memory.owner_start + memory.owner_nbytes:
            raise leaf_type_error(leaf, path, "its storage was freed or is too small")
        facts = _FACTS[plain.dtype]
        return TensorLeaf(
            library="torch",
            dtype=facts.name,
            shape=tuple(plain.shape),
            strides=plain.stride(),
            itemsize=facts.itemsize,
            element_width=facts.element_width,
            is_float=facts.is_float,
            origin=origin,
            memory=memory,
            is_parameter=type(leaf) is torch.nn.Parameter,
            requires_grad=leaf.requires_grad,
            # Writing to the resolved copy would not change the leaf.
            is_writable=not is_lazy,
        )

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Return fingerprints of plain tensors; None if ``describe`` would refuse or copy one of them.

        The trainer waits for this. So each attribute is read from all tensors in one loop in C.
        """
        kinds = list(map(type, leaves))
        if not PLAIN_KINDS.issuperset(kinds):
            return None
        tensors = cast("Sequence[torch.Tensor]", leaves)
        if not are_strided(tensors) or any(map(torch.Tensor.is_neg, tensors)):
            return None
        described = list(map(_FACTS_OF, tensors))
        if any(dtype.is_complex for dtype in set(map(_FIRST_OF, described))) and any(
            map(torch.Tensor.is_conj, tensors)
        ):
            return None
        if any(map(_ATTRIBUTES_OF, tensors)):
            return None
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        starts = list(map(torch.UntypedStorage.data_ptr, storages))
        devices = list(map(device_of, tensors))
        readers: list[DeviceBytes | None] = [None] * len(tensors)
        if any(devices):
            rows = zip(storages, starts, devices, strict=True)
            readers = [
                None if device is None else DeviceBytes(storage, start, device) for storage, start, device in rows
            ]
        facts = (
            kinds,
            described,
            map(torch.Tensor.stride, tensors),
            map(torch.Tensor.storage_offset, tensors),
            map(torch.UntypedStorage.nbytes, storages),
            devices,
        )
        # Detach from the autograd graph; leaves have none.
        with_grad = compress(tensors, map(_LAST_OF, described))
        plain = tensors if all(map(_IS_LEAF_OF, with_grad)) else list(map(torch.Tensor.detach, tensors))
        return LeafBatch(
            list(zip(*facts, strict=True)),
            starts,
            list(zip(plain, storages, strict=True)),
            readers,
        )

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return a dtype, device, Size or similar value as text."""
        kind = _NAMED_KINDS.get(type(leaf))
        if kind is not None:
            return kind, str(leaf).removeprefix("torch.")
        if isinstance(leaf, torch.device):
            return "torch.device", str(leaf)
        if type(leaf) is torch.Size:
            return "torch.Size", ",".join(str(length) for length in leaf)
        return None

    def decode_value(self, kind: str, value: Value) -> object:
        """Build the dtype, device, Size or similar value."""
        if type(value) is not str:
            raise MalformedError("a plain value of torch is malformed", where=repr(kind[:80]))
        if kind in _NAMED:
            if value not in _NAMED[kind]:
                raise UnsupportedError(
                    f"this version of torch does not have the {kind}", where=repr(value[:80]), todo="use a newer torch"
                )
            return _NAMED[kind][value]
        if kind == "torch.device":
            return _make_device(value)
        if kind == "torch.Size":
            return _make_size(value)
        raise UnsupportedError("a plain value of torch has an unknown type", where=repr(kind[:80]))

    def convert(self, leaf: object) -> tuple[str, object] | None:
        """Return the device and state of a random number generator."""
        if isinstance(leaf, torch.Generator):
            # As an array: the state is on the host, whatever device tensors are restored to.
            return _GENERATOR, {"device": str(leaf.device), "state": leaf.get_state().numpy()}
        if isinstance(leaf, StandIn) and leaf.kind == _GENERATOR.removeprefix(BUILT_IN):
            self.build_converted(_GENERATOR, leaf.content)
            return _GENERATOR, leaf.content
        return None

    def build_converted(self, name: str, state: object) -> object:
        """Build the generator; a StandIn if the device does not exist."""
        if name != _GENERATOR:
            raise UnsupportedError("a leaf of torch has an unknown type", where=repr(name[:80]))
        device, content = (state.get("device"), state.get("state")) if isinstance(state, dict) else (None, None)
        if (
            type(device) is not str
            or not isinstance(content, np.ndarray)
            or content.dtype != np.uint8
            or content.ndim != 1
        ):
            raise MalformedError("a stored generator does not have the form of its type", where=repr(name[:80]))
        try:
            generator = torch.Generator(device)
        except (RuntimeError, AssertionError):
            return StandIn(_GENERATOR.removeprefix(BUILT_IN), device, state)
        try:
            generator.set_state(torch.from_numpy(np.ascontiguousarray(content)))
        except (RuntimeError, TypeError, ValueError):
            raise MalformedError("torch rejects the state of a generator", where=repr(device[:80])) from None
        return generator

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return the bytes of one element, after checking dtype and flags."""
        dtype = dtype_named(spec.dtype)
        if spec.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise MalformedError("a tensor of an integer dtype requires a gradient", where=spec.dtype)
        return dtype.itemsize

    def adopt(self, memory: NDArray[np.uint8], device: object) -> object:
        """Return the memory as a uint8 tensor on the device."""
        tensor = torch.from_numpy(memory)
        if device is None:
            return tensor
        assert isinstance(device, torch.device)
        try:
            return tensor.to(device)
        except torch.cuda.OutOfMemoryError:
            raise CapacityError(
                f"no memory for a storage of {memory.nbytes} bytes", where=device, todo="restore to the CPU"
            ) from None

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Build the tensor as a view of the adopted bytes."""
        assert isinstance(adopted, torch.Tensor)
        dtype = dtype_named(spec.dtype)
        rest = spec.offset % dtype.itemsize
        if rest:
            # torch counts offsets in elements, so this view needs a storage with another start.
            is_host = adopted.device.type == "cpu"
            adopted = torch.from_numpy(adopted.numpy()[rest:]) if is_host else adopted[rest:].clone()
        # torch warns when it creates a complex32 tensor, but not when it views integers as complex32.
        first = torch.int32 if dtype == torch.complex32 else dtype
        tensor = torch.empty(0, dtype=first, device=adopted.device)
        tensor.set_(adopted.untyped_storage(), spec.offset // dtype.itemsize, spec.shape, spec.strides)
        tensor = tensor if first == dtype else tensor.view(dtype)
        if spec.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=spec.requires_grad)
        return tensor.requires_grad_(spec.requires_grad) if spec.requires_grad else tensor

    def assemble(self, spec: TensorSpec, adopted: object) -> object:
        """Return the bytes of a tensor in tiles as those of a contiguous one that begins with them."""
        count = count_of(spec.shape)
        flat = self.build(
            replace(spec, shape=(count,), strides=(1,), cuts=(), is_parameter=False, requires_grad=False), adopted
        )
        assert isinstance(flat, torch.Tensor)
        whole, source, itemsize = (
            torch.empty(spec.shape, dtype=flat.dtype, device=flat.device),
            as_words(flat),
            flat.dtype.itemsize,
        )
        for view in views_of(spec.shape, itemsize, spec.cuts, Box((0,) * len(spec.shape), spec.shape)):
            block = self.block_of(as_words(whole), view.box)
            assert isinstance(block, torch.Tensor)
            begin = int(source.storage_offset()) + view.offset // itemsize
            block.copy_(source.as_strided(view.box.sizes, view.strides, begin))
        return whole.reshape(-1).view(torch.uint8)

    def check_device(self, device: Any) -> object:
        """Return the device, or None for the CPU."""
        try:
            made = torch.empty(0, device=device).device
        except (RuntimeError, TypeError, AssertionError) as error:
            raise UsageError("the device does not exist", where=repr(device), todo=str(error).split("\n")[0]) from None
        if made.type == "meta":
            raise UsageError("nothing can be restored to the meta device", where=repr(device))
        return None if made.type == "cpu" else made

    def copy_into(self, target: object, source: object) -> None:
        """Overwrite the elements of a tensor bit for bit, or the state of a generator."""
        if isinstance(target, torch.Generator) and isinstance(source, torch.Generator):
            target.set_state(source.get_state())
            return
        assert isinstance(target, torch.Tensor)
        assert isinstance(source, torch.Tensor)
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            destination, words = as_words(target.detach()), as_words(source.detach())
            for dim, step in enumerate(destination.stride()):
                if step == 0 and destination.shape[dim] > 1:
                    # An expanded dimension repeats one element, and torch refuses to write it more than once.
                    destination, words = destination.narrow(dim, 0, 1), words.narrow(dim, 0, 1)
            destination.copy_(words)

    def mark_written(self, targets: Sequence[object]) -> None:
        """Increment the version counters of tensors, so that autograd detects a stale graph."""
        tensors = cast("Sequence[torch.Tensor]", targets)
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        if _COUNTS_MANY:
            increment_version(counted)
        else:
            for tensor in counted:
                increment_version(tensor)

    def object_of(self, item: object) -> KnownObject | None:
        """Return what can be predicted about a module or an optimizer."""
        return known_object(item)

    takes_shards = False

    def local_parts(self, item: object) -> Sequence[LocalPart] | None:
        """Return None: this adapter takes whole tensors only."""
        return None

    def block_of(self, item: object, box: Box) -> object:
        """Return the view of a block of a tensor."""
        assert isinstance(item, torch.Tensor)
        block = item.detach()
        for dim, (begin, count) in enumerate(zip(*box, strict=True)):
            block = block.narrow(dim, begin, count)
        return block

    def empty_like(self, item: object, spec: TensorSpec) -> object | None:
        """Return None: this adapter takes whole tensors only."""
        return None


def _counts_many() -> bool:
    """Say whether this version of torch increments the version counters of several tensors in one call."""
    try:
        increment_version(())
    except TypeError:
        return False
    return True


_COUNTS_MANY = _counts_many()


def _why_not_storable(leaf: torch.Tensor) -> str | None:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        is_shard = is_dtensor(leaf) or is_sharded_tensor(leaf)
        return "a shard of a tensor of many ranks" if is_shard else "a subclass of torch.Tensor"
    if leaf.is_nested or leaf.layout != torch.strided:
        return f"its layout is {'nested' if leaf.is_nested else leaf.layout}"
    if leaf.is_quantized or leaf.dtype not in _FACTS:
        return f"its dtype {leaf.dtype} is quantized"
    if leaf.is_meta:
        return "it is on the meta device and has no bytes"
    return None


def _advice_for(leaf: torch.Tensor) -> str | None:
    """Return what to do with a tensor that cannot be stored; None: it can have a converter."""
    if type(leaf) not in PLAIN_KINDS:
        return OPEN_WITH_RANKS if is_dtensor(leaf) or is_sharded_tensor(leaf) else None
    if leaf.is_meta:
        return "give it memory first, for example with to_empty(device=...), or leave it out"
    if leaf.is_quantized:
        return "commit its int_repr(), q_scale() and q_zero_point()"
    if leaf.is_nested:
        return "commit what unbind() returns"
    return "commit its to_dense(), or its indices and values"


def _memory_of(plain: torch.Tensor) -> tuple[Memory, int]:
    storage = plain.untyped_storage()
    itemsize = plain.dtype.itemsize
    start = storage.data_ptr()
    origin = start + int(plain.storage_offset()) * itemsize
    if plain.is_contiguous():
        nbytes = plain.numel() * itemsize
    else:
        _, nbytes = extent_of(tuple(plain.shape), tuple(step * itemsize for step in plain.stride()), itemsize)
    device = device_of(plain)
    if device is None:
        return Memory("cpu", start, storage.nbytes(), origin, nbytes, (plain, storage)), origin
    read = DeviceBytes(storage, start, device)
    return Memory(str(device), start, storage.nbytes(), origin, nbytes, (plain, storage), read), origin


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided: neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def are_strided(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are strided: neither sparse nor nested."""
    # The layout of a nested tensor may be torch.strided.
    return [*map(_LAYOUT_OF, tensors)].count(torch.strided) == len(tensors) and not any(map(_IS_NESTED, tensors))


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the device of a tensor; None: host memory."""
    return None if tensor.is_cpu else tensor.device


# Not frozen: a commit creates hundreds, and freezing makes creation slower.
@dataclass(slots=True)
class DeviceBytes:
    """Reads the bytes of a storage on a device by address."""

    storage: torch.UntypedStorage
    start: int
    device: torch.device

    def __call__(self, lo: int, hi: int) -> memoryview:
        """Copy bytes to the host.

        Raises:
            BackendError: The device failed, or the storage has become shorter.
        """
        try:
            return copy_to_host(self.on_device(lo, hi))
        except RuntimeError as error:
            raise device_error(error) from None

    def on_device(self, lo: int, hi: int) -> torch.Tensor:
        """Return bytes as a uint8 tensor that shares their memory.

        Raises:
            BackendError: The storage has become shorter.
        """
        if not self.start <= lo <= hi <= self.start + self.storage.nbytes():
            # ``set_`` would resize the storage.
            raise resized_error()
        tensor = torch.empty(0, dtype=torch.uint8, device=self.device)
        return tensor.set_(self.storage, lo - self.start, (hi - lo,), (1,))


def device_error(error: RuntimeError) -> BackendError:
    """Return the error for a failed copy from a device."""
    return BackendError(f"copying from a device failed: {error}", todo="check the state of the device")


def resized_error() -> BackendError:
    """Return the error for a storage that became shorter while it was read."""
    return BackendError(
        "a storage was resized while a commit read it",
        todo="resize tensors after their commit has finished, or after its guard",
    )


def copy_to_host(tensor: torch.Tensor) -> memoryview:
    """Copy a uint8 tensor on a device to host memory, and return its bytes."""
    return tensor.cpu().numpy().data


def wait_for_devices(storages: Iterable[object]) -> None:
    """Wait until devices have finished the work of this thread, so that any thread can read the results."""
    readers = [getattr(storage, "reader", None) for storage in storages]
    for device in {reader.device for reader in readers if isinstance(reader, DeviceBytes)}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that is stored under a name."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(
            "this version of torch does not have the dtype", where=repr(name[:80]), todo="use a newer torch"
        ) from None


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, which torch copies without conversion."""
    words = _COPY_AS.get(tensor.dtype.itemsize)
    return tensor if words is None else tensor.view(words)


def _make_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise UnsupportedError("this version of torch does not have the device", where=repr(text[:80])) from None


def _make_size(text: str) -> torch.Size:
    parts = text.split(",") if text else []
    is_number = all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts)
    if not is_number or any(int(part) >= 1 << 63 for part in parts):
        raise MalformedError("a torch.Size is malformed", where=repr(text[:80]))
    return torch.Size(int(part) for part in parts)


def _table_of(kind: type) -> dict[str, object]:
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, kind)}


_NAMED_KINDS: dict[type, str] = {
    torch.dtype: "torch.dtype",
    torch.layout: "torch.layout",
    torch.memory_format: "torch.memory_format",
    torch.qscheme: "torch.qscheme",
}
_NAMED = {name: _table_of(kind) for kind, name in _NAMED_KINDS.items()}
"""All plain values of torch by kind and name, including the quantized dtypes."""

_GENERATOR = f"{BUILT_IN}torch.Generator"
