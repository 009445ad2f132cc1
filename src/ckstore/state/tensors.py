"""What a library of tensors must offer: memory to read, leaves to describe, and tensors to build.

Nothing here imports numpy or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ckstore.format.tensors import (
    TensorSpec,
    byte_strides_of,
    count_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckstore.format.tree import Path, Value


class HostStorage(Protocol):
    """The bytes of a storage that is to be committed."""

    @property
    def nbytes(self) -> int:
        """Length of the span."""
        ...

    @property
    def element_width(self) -> int:
        """Bytes of one element of the tensor that fills most of it: 1, 2, 4 or 8."""
        ...

    @property
    def is_float(self) -> bool:
        """Whether those elements are little-endian floating-point numbers."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether they lie in host memory."""
        ...

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``: host memory as it lies, device memory as a copy of this slice."""
        ...


# Not frozen: hundreds are made in each commit, and that would take three times as long.
@dataclass(slots=True)
class Memory:
    """The allocation that a tensor views, and the part of it the tensor spans.

    Args:
        space: Where addresses mean something: ``"cpu"``, or a device's name.
        owner_start: Address of the allocation's first byte.
        owner_nbytes: Its length.
        start: Address of the lowest byte that the tensor views.
        nbytes: Length of the span it views, from the lowest to the highest byte.
        keep: Objects that keep the allocation alive.
        read: Copies ``(lo, hi)``, as addresses, to the host; None where the host can read them itself.
    """

    space: str
    owner_start: int
    owner_nbytes: int
    start: int
    nbytes: int
    keep: object
    read: Callable[[int, int], memoryview] | None = None


# Not frozen: hundreds are made in each commit, and that would take three times as long.
@dataclass(slots=True)
class TensorLeaf:
    """A live tensor, described: what TensorSpec says but for the storage, and the memory it lies in.

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
        """Step of each dimension in bytes, whatever unit the library counts in."""
        return byte_strides_of(self.library, self.strides, self.itemsize)

    @property
    def sight(self) -> Sight:
        """What a look at it tells."""
        memory = self.memory
        place = (memory.space, memory.owner_nbytes, memory.start - memory.owner_start, memory.nbytes)
        facts = (self.library, self.dtype, self.shape, self.strides, self.itemsize, self.element_width, self.is_float)
        flags = (self.origin - memory.owner_start, self.is_parameter, self.requires_grad)
        return (*facts, *place, *flags), memory.owner_start, memory.keep, memory.read


Sight = tuple[tuple[object, ...], int, object, Callable[[int, int], memoryview] | None]
"""What a look at a tensor tells: facts, the address of its allocation, and ``keep`` and ``read`` of its memory.

Two tensors with equal facts, and of equal addresses, are described in the same way but for ``keep`` and ``read``; with
another address, every address in the description differs by as much.
"""


class LeafBatch(NamedTuple):
    """What a look at some tensors tells, each part of a ``Sight`` in a list of its own; facts can be hashed."""

    facts: Sequence[tuple[object, ...]]
    starts: Sequence[int]
    keeps: Sequence[object]
    readers: Sequence[Callable[[int, int], memoryview] | None]


class KnownObject(Protocol):
    """An object with ``load_state_dict`` of which a library knows what its loading does."""

    @property
    def kind(self) -> Literal["module", "optimizer"]:
        """Whether it holds all its tensors already and takes no others, or takes over what it is given."""
        ...

    def live(self) -> Mapping[Any, Any] | None:
        """Return its state if its loading only copies, so that these tensors may be written before it is called.

        None: its loading may do more, and has to be given what was restored.
        """
        ...

    def owns(self, tensor: object) -> bool:
        """Whether a tensor of its state may be written, because nothing that was not chosen is the same memory."""
        ...

    def misfits(self, state: Mapping[Any, Any]) -> list[tuple[Path, str]]:
        """Return what does not fit although keys and tensors do: places below the object, and texts.

        Args:
            state: What would be loaded, with a ``TensorSpec`` in place of each tensor.
        """
        ...

    def now(self) -> Mapping[Any, Any]:
        """Return the tensors that it holds now, by the keys of its state, without calling anything of its own."""
        ...


class LeafAdapter(Protocol):
    """A library of tensors: how its leaves become spans of bytes, and how they come back."""

    @property
    def library(self) -> str:
        """The name in TensorSpec.library, and the first part of the type of its plain values."""
        ...

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor of this library; None: not one of ours.

        Raises:
            LeafTypeError: It is one of ours that cannot be stored.
        """
        ...

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Say what tells whether ``describe`` would say of each the same as before; None: ask it, not all are usual."""
        ...

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return type and value of a plain value of this library (a dtype, a scalar); None: not one of ours."""
        ...

    def decode_value(self, kind: str, value: Value) -> object:
        """Make the plain value again.

        Raises:
            MalformedError: The value is none that ``encode_value`` makes.
            UnsupportedError: The library of today does not know it.
        """
        ...

    def take_apart(self, leaf: object) -> tuple[str, object] | None:
        """Return how an object of this library is stored: a conversion's name, and a state; None: not one of ours."""
        ...

    def put_together(self, name: str, state: object) -> object:
        """Make the object again, or a StandIn where this machine cannot have it.

        Raises:
            MalformedError: The state is none that ``take_apart`` returns.
            UnsupportedError: No such name.
        """
        ...

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return the bytes of one element, having checked dtype and flags, which come from disk.

        Raises:
            UnsupportedError: The library of today has no such dtype.
            MalformedError: No writer of ours makes such a spec.
        """
        ...

    def adopt(self, memory: NDArray[np.uint8], device: object) -> object:
        """Turn a filled host buffer (a 1-D uint8 numpy array) into what ``build`` takes, on the device."""
        ...

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Make the tensor as a view of the adopted memory; the spec has been checked against its length."""
        ...

    def check_device(self, device: object) -> object:
        """Return the device as ``adopt`` wants it; UsageError if there is none such."""
        ...

    def copy_into(self, target: object, source: object) -> None:
        """Overwrite the target's elements, bit for bit, with those of a tensor of equal dtype and shape."""
        ...

    def written(self, target: object) -> None:
        """Tell the library that the target's bytes were overwritten behind its back."""
        ...

    def object_of(self, item: object) -> KnownObject | None:
        """Return what is known of an object with ``load_state_dict``; None: nothing."""
        ...
