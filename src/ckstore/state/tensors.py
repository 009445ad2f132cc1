"""The interface between ckstore and a tensor library.

``LeafAdapter`` is implemented once for each library. ``TensorLeaf`` describes a live tensor, and ``HostStorage`` gives
access to the bytes of a storage. Nothing here imports numpy or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from ckstore.format.tensors import TensorSpec, byte_strides_of, count_of
from ckstore.format.tiles import Box

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckstore.format.tree import Path, Value


Reader = Callable[[int, int], memoryview]
"""Copies the bytes between two device addresses to the host."""


@runtime_checkable
class OnDevice(Protocol):
    """A reader whose device can compute with the bytes."""

    def on_device(self, lo: int, hi: int) -> Any:
        """Return the bytes between two device addresses as a torch tensor of bytes that shares their memory."""
        ...


class HostStorage(Protocol):
    """The bytes of one storage of a commit."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        ...

    @property
    def element_width(self) -> int:
        """Bytes of one element of the storage's largest tensor: 1, 2, 4 or 8."""
        ...

    @property
    def is_float(self) -> bool:
        """Whether these elements are little-endian floating-point numbers."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether the bytes are in host memory."""
        ...

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``: host memory without a copy, device memory as a copy of this range."""
        ...


# Not frozen: a commit creates hundreds, and freezing makes creation three times as slow.
@dataclass(slots=True)
class Memory:
    """The allocation that a tensor views, and the part of it that the tensor spans.

    Args:
        space: The address space: ``"cpu"``, or the name of a device.
        owner_start: Address of the allocation's first byte.
        owner_nbytes: Length of the allocation.
        start: Address of the lowest byte that the tensor views.
        nbytes: Bytes from the lowest to the highest byte that the tensor views.
        keep: Objects that keep the allocation alive.
        read: Copies a range of addresses to the host; None for host memory.
    """

    space: str
    owner_start: int
    owner_nbytes: int
    start: int
    nbytes: int
    keep: object
    read: Reader | None = None


# Not frozen: a commit creates hundreds, and freezing makes creation three times as slow.
@dataclass(slots=True)
class TensorLeaf:
    """Description of a live tensor: the fields of TensorSpec without the storage, and the tensor's memory.

    Args:
        origin: Address of element (0, ..., 0).
        itemsize: Bytes of one element.
        element_width: Bytes of the unit that byte planes are made of: 1, 2, 4 or 8.
        is_writable: Whether the elements may be overwritten.
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    element_width: int
    is_float: bool
    origin: int
    memory: Memory
    is_parameter: bool = False
    requires_grad: bool = False
    is_writable: bool = True

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return count_of(self.shape)

    @property
    def byte_strides(self) -> tuple[int, ...]:
        """Stride of each dimension in bytes, whatever unit the library counts in."""
        return byte_strides_of(self.library, self.strides, self.itemsize)

    @property
    def fingerprint(self) -> LeafFingerprint:
        """The tensor's row of a ``LeafBatch``."""
        memory = self.memory
        extent = (memory.space, memory.owner_nbytes, memory.start - memory.owner_start, memory.nbytes)
        facts = (self.library, self.dtype, self.shape, self.strides, self.itemsize, self.element_width, self.is_float)
        flags = (self.origin - memory.owner_start, self.is_parameter, self.requires_grad, self.is_writable)
        return (*facts, *extent, *flags), memory.owner_start, memory.keep, memory.read


LeafFingerprint = tuple[tuple[object, ...], int, object, Reader | None]
"""Facts about a tensor, the address of its allocation, and ``keep`` and ``read`` of its memory.

Two tensors with equal facts and addresses have equal descriptions, except for ``keep`` and ``read``. If only the
addresses differ, all addresses in the descriptions differ by the same amount.
"""


class LeafBatch(NamedTuple):
    """The fingerprints of several tensors as columns; facts are hashable."""

    facts: Sequence[tuple[object, ...]]
    starts: Sequence[int]
    keeps: Sequence[object]
    readers: Sequence[Reader | None]


class LocalPart(NamedTuple):
    """A box of a global tensor that a live shard holds, and the local tensor that has its elements."""

    box: Box
    item: object


class KnownObject(Protocol):
    """An object with ``load_state_dict`` whose loading a library can predict."""

    @property
    def kind(self) -> Literal["module", "optimizer"]:
        """A module copies into tensors it already has; an optimizer takes over the tensors it is given."""
        ...

    def copyable_state(self) -> Mapping[Any, Any] | None:
        """Return the object's state if loading only copies, so that its tensors may be written before loading.

        None: loading may do more. The object must be given the restored values.
        """
        ...

    def owns(self, tensor: object) -> bool:
        """Whether a tensor of the state may be written: its memory belongs to the state alone."""
        ...

    def mismatches(self, state: Mapping[Any, Any]) -> list[tuple[Path, str]]:
        """Return what does not fit although keys and tensors match: paths below the object, and texts.

        Args:
            state: The state to load, with a ``TensorSpec`` in place of each tensor.
        """
        ...

    def current_tensors(self) -> Mapping[Any, Any]:
        """Return the object's tensors by the keys of its state, without calling a method of the object."""
        ...

    def parameters(self) -> Mapping[Any, Any]:
        """Return the parameters that an optimizer's state is about, nested as in ``current_tensors``."""
        ...


class LeafAdapter(Protocol):
    """A tensor library: how its leaves become spans of bytes, and how they are built again."""

    @property
    def library(self) -> str:
        """The name in TensorSpec.library, and the prefix of the types of the library's plain values."""
        ...

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor of this library; None: not a tensor of this library.

        Raises:
            LeafTypeError: A tensor of this library that cannot be stored.
        """
        ...

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Return facts from which a change of any ``describe`` result can be detected; None: use ``describe``."""
        ...

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return type and value of a plain value of this library (a dtype, a scalar); None: not one of these."""
        ...

    def decode_value(self, kind: str, value: Value) -> object:
        """Build the plain value.

        Raises:
            MalformedError: ``encode_value`` does not produce this value.
            UnsupportedError: The installed library does not have this value.
        """
        ...

    def convert(self, leaf: object) -> tuple[str, object] | None:
        """Return the conversion name and the state of an object of this library; None: not one of these."""
        ...

    def build_converted(self, name: str, state: object) -> object:
        """Build the object; a StandIn if this machine cannot have it.

        Raises:
            MalformedError: ``convert`` does not produce this state.
            UnsupportedError: Unknown name.
        """
        ...

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return the bytes of one element, after checking dtype and flags, which come from disk.

        Raises:
            UnsupportedError: The installed library does not have this dtype.
            MalformedError: ckstore does not write such a spec.
        """
        ...

    def adopt(self, memory: NDArray[np.uint8], device: object) -> object:
        """Turn a filled host buffer (a 1-D uint8 array) into the argument of ``build``, on the device."""
        ...

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Build the tensor as a view of the adopted memory; the caller has checked the spec against its length."""
        ...

    def assemble(self, spec: TensorSpec, adopted: object) -> object:
        """Return the argument of ``build`` for a tensor in tiles: a contiguous tensor that begins with its bytes."""
        ...

    def check_device(self, device: object) -> object:
        """Return the device in the form that ``adopt`` takes; UsageError if it does not exist."""
        ...

    def copy_into(self, target: object, source: object) -> None:
        """Overwrite the target's elements, bit for bit, with those of a tensor of equal dtype and shape."""
        ...

    def mark_written(self, targets: Sequence[object]) -> None:
        """Tell the library that the bytes of these tensors were overwritten without its functions."""
        ...

    def object_of(self, item: object) -> KnownObject | None:
        """Return what the library can predict about an object with ``load_state_dict``; None: nothing."""
        ...

    @property
    def takes_shards(self) -> bool:
        """Whether shards of global tensors are described: by the global tensor."""
        ...

    def local_parts(self, item: object) -> Sequence[LocalPart] | None:
        """Return the boxes of a global tensor that a shard holds; None: the item is a whole tensor."""
        ...

    def block_of(self, item: object, box: Box) -> object:
        """Return the view of a block of a tensor."""
        ...

    def empty_like(self, item: object, spec: TensorSpec) -> object | None:
        """Return a new shard that is distributed like a live one, for a tensor of its shape; None: it is no shard."""
        ...
