"""Numpy arrays and long byte strings as leaves, and host memory as bytes.

Invariants:
- An array of any dtype without objects comes back with its shape, strides and bits; it comes back writable.
- A dtype is stored under a name only if that name makes an equal dtype again.
- Nothing here copies the bytes of an array.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.errors import CapacityError, MalformedError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec, extent_of
from ckstore.state.tensors import KnownObject, LeafBatch, Memory, TensorLeaf
from ckstore.state.values import leaf_type_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckstore.format.tree import Path, Value


_SIMPLE_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,10}(\[\d{0,9}[A-Za-z]{1,2}\])?|[<>|][mM]8")
_DTYPE_NAME_MAX = 1 << 20
_LINE_NBYTES = 64
_MAPPED_NBYTES_MIN = 1 << 20


class _Address:
    """Lends numpy a range of addresses, and keeps alive what it belongs to."""

    def __init__(self, start: int, nbytes: int, keep: object) -> None:
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (start, True), "version": 3}
        self.keep = keep


def view_of_memory(start: int, nbytes: int, keep: object) -> memoryview:
    """Return these bytes of this process, read-only, without a copy; ``keep`` lives as long as the view."""
    if nbytes == 0:
        return memoryview(b"")
    return np.asarray(_Address(start, nbytes, keep)).data


def writable_view_of(start: int, nbytes: int, keep: object) -> memoryview:
    """Return these bytes of this process for writing; ``keep`` lives as long as the view."""
    if nbytes == 0:
        return memoryview(bytearray())
    address = _Address(start, nbytes, keep)
    address.__array_interface__["data"] = (start, False)
    return np.asarray(address).data


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """Return uninitialized host memory, aligned for vector loads, and for direct I/O if it is large.

    Raises:
        CapacityError: There is not so much memory.
    """
    try:
        return _map(nbytes) if nbytes >= _MAPPED_NBYTES_MIN else _take(nbytes)
    except (MemoryError, OSError, OverflowError, ValueError):
        raise CapacityError(
            f"no memory for a storage of {nbytes} bytes", todo="restore fewer leaves with only=, or in place with into="
        ) from None


def _take(nbytes: int) -> NDArray[np.uint8]:
    memory = np.empty(nbytes + _LINE_NBYTES, np.uint8)
    skip = -memory.__array_interface__["data"][0] % _LINE_NBYTES
    return memory[skip : skip + nbytes]


def _map(nbytes: int) -> NDArray[np.uint8]:
    # A first touch by ordinary pages takes three times as long as by huge ones, longer than to hash what is written.
    # Mappings made one after another lie side by side, and a huge page may cover where one ends and the next begins.
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        # Perhaps there are as many mappings as there may be.
        return _take(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; ordinary ones do.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name a dtype is stored under; ``dtype_named`` undoes it."""
    if dtype.subdtype is None and dtype.fields is None:
        return str(dtype.str)
    return json.dumps(_describe_dtype(dtype), separators=(",", ":"))


def _describe_dtype(dtype: np.dtype[Any]) -> object:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe_dtype(base), "shape": list(shape)}
    if dtype.fields is None:
        return dtype.str
    names = dtype.names or ()
    fields = [dtype.fields[name] for name in names]
    return {
        "names": list(names),
        "formats": [_describe_dtype(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a stored name.

    Raises:
        MalformedError: No writer of ours makes such a name.
        UnsupportedError: This platform or this numpy has no such dtype.
    """
    try:
        if len(name) > _DTYPE_NAME_MAX:
            raise ValueError("too long")
        dtype = _make_dtype(json.loads(name) if name.startswith("{") else name)
        is_same = dtype_name(dtype) == name
    except UnsupportedError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError):
        raise MalformedError("a numpy dtype is malformed", where=repr(name[:80])) from None
    if not is_same or dtype.hasobject:
        raise MalformedError("a numpy dtype is malformed", where=repr(name[:80]))
    return dtype


def _make_dtype(told: Any) -> np.dtype[Any]:
    if isinstance(told, str):
        # Only what dtype.str gives: numpy's own parser knows far more than we want to hand it.
        if _SIMPLE_DTYPE.fullmatch(told) is None:
            raise ValueError(told)
        try:
            return np.dtype(told)
        except TypeError:
            raise UnsupportedError("this numpy has no such dtype", where=repr(told[:80])) from None
    if "base" in told:
        return np.dtype((_make_dtype(told["base"]), tuple(told["shape"])))
    layout: Any = {key: told[key] for key in ("names", "offsets", "titles", "itemsize")}
    if all(title is None for title in layout["titles"]):
        del layout["titles"]
    layout["formats"] = [_make_dtype(inner) for inner in told["formats"]]
    made: np.dtype[Any] = np.dtype(layout, align=told["aligned"] is True)
    return made


def _is_storable(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject:
        return False
    try:
        # Dtypes of other packages look like plain void to dtype.str; they compare unequal here.
        return dtype_named(dtype_name(dtype)) == dtype
    except (MalformedError, UnsupportedError, TypeError):
        return False


def _start_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _owner_of(array: NDArray[Any]) -> tuple[int, int]:
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    lo, hi = extent_of(owner.shape, owner.strides, owner.itemsize)
    return _start_of(owner) + lo, hi - lo


def _width_of(dtype: np.dtype[Any]) -> tuple[int, bool]:
    if dtype.kind in "fc":
        width = dtype.itemsize if dtype.kind == "f" else dtype.itemsize // 2
        is_plain = width in (2, 4, 8)
        return (width if is_plain else 1), is_plain and dtype.newbyteorder("<") == dtype
    if dtype.kind == "U":
        return 4, False
    return (dtype.itemsize if dtype.kind in "iumMb" else 1), False


class NumpyAdapter:
    """Arrays of exactly numpy.ndarray, and numpy's scalars as plain values."""

    library = "numpy"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe an array; subclasses and arrays of objects are refused."""
        if not isinstance(leaf, np.ndarray):
            return None
        if type(leaf) is not np.ndarray:
            raise leaf_type_error(leaf, path, "a subclass of numpy.ndarray")
        if not _is_storable(leaf.dtype):
            raise leaf_type_error(leaf, path, f"its dtype {leaf.dtype} holds objects or is foreign to numpy")
        lo, hi = extent_of(leaf.shape, leaf.strides, leaf.itemsize)
        origin = _start_of(leaf)
        owner_start, owner_nbytes = _owner_of(leaf)
        width, is_float = _width_of(leaf.dtype)
        return TensorLeaf(
            library="numpy",
            dtype=dtype_name(leaf.dtype),
            shape=leaf.shape,
            strides=leaf.strides,
            itemsize=leaf.itemsize,
            element_width=width,
            is_float=is_float,
            origin=origin,
            memory=Memory("cpu", owner_start, owner_nbytes, origin + lo, hi - lo, leaf),
            is_writable=leaf.flags.writeable,
        )

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Describe them: there are few arrays in a state."""
        sights = [told.sight for leaf in leaves if (told := self.describe(leaf, ())) is not None]
        return LeafBatch(*zip(*sights, strict=True)) if len(sights) == len(leaves) else None

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return a scalar as its dtype and bytes."""
        if not isinstance(leaf, np.generic):
            return None
        if type(leaf) is np.str_:
            # Not str(leaf): numpy drops zeros at the end.
            return "numpy.str_", leaf.encode("utf-8", "surrogatepass")
        if type(leaf) is np.bytes_:
            return "numpy.bytes_", bytes(leaf)
        if not _is_storable(leaf.dtype) or leaf.dtype.itemsize == 0 or type(leaf) is not leaf.dtype.type:
            raise leaf_type_error(leaf, path, f"a scalar of dtype {leaf.dtype}")
        return f"numpy.{dtype_name(leaf.dtype)}", leaf.tobytes()

    def decode_value(self, kind: str, value: Value) -> object:
        """Make the scalar again."""
        if type(value) is not bytes:
            raise MalformedError("a numpy scalar is malformed", where=repr(kind[:80]))
        name = kind.partition(".")[2]
        try:
            if name == "str_":
                return np.str_(value.decode("utf-8", "surrogatepass"))
            if name == "bytes_":
                return np.bytes_(value)
            dtype = dtype_named(name)
            if dtype.itemsize == 0 or len(value) != dtype.itemsize:
                raise ValueError(name)
            # Through a copy, so that a structured scalar is writable, as it was.
            return np.frombuffer(value, dtype).copy()[0]
        except (ValueError, UnicodeDecodeError):
            raise MalformedError("a numpy scalar is malformed", where=repr(kind[:80])) from None

    def take_apart(self, leaf: object) -> tuple[str, object] | None:
        """Return None: numpy's leaves are arrays and scalars."""
        return None

    def put_together(self, name: str, state: object) -> object:
        """Raise: there are no such leaves."""
        raise UnsupportedError("a leaf of numpy has an unknown type", where=repr(name[:80]))

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return the bytes of one element, having checked the dtype."""
        if spec.is_parameter or spec.requires_grad:
            raise MalformedError("a numpy array wants a gradient", where=repr(spec.dtype[:80]))
        return dtype_named(spec.dtype).itemsize

    def adopt(self, memory: NDArray[np.uint8], device: object) -> object:
        """Return the memory as it is; arrays know no devices."""
        return memory

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Make the array as a view of the memory."""
        assert isinstance(adopted, np.ndarray)
        dtype = dtype_named(spec.dtype)
        try:
            return np.ndarray(spec.shape, dtype, adopted.data, spec.offset, spec.strides)
        except (ValueError, TypeError):
            raise MalformedError("numpy cannot make such an array", where=f"{spec.dtype[:80]} {spec.shape}") from None

    def check_device(self, device: object) -> object:
        """Return None: arrays know no devices."""
        return None

    def copy_into(self, target: object, source: object) -> None:
        """Overwrite the array's elements."""
        assert isinstance(target, np.ndarray)
        assert isinstance(source, np.ndarray)
        target[...] = source

    def written(self, target: object) -> None:
        """Do nothing: arrays keep no version."""

    def object_of(self, item: object) -> KnownObject | None:
        """Return None: numpy has no such objects."""
        return None


class BytesAdapter(NumpyAdapter):
    """Byte strings too long for the tree; stored as chunks, restored as bytes."""

    library = "bytes"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a bytes object, of whatever length."""
        if type(leaf) is not bytes:
            return None
        array = np.frombuffer(leaf, np.uint8)
        start = _start_of(array)
        memory = Memory("cpu", start, len(leaf), start, len(leaf), leaf)
        return TensorLeaf("bytes", "", (len(leaf),), (1,), 1, 1, False, start, memory, is_writable=False)

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return None: short byte strings are plain values of Python."""
        return None

    def decode_value(self, kind: str, value: Value) -> object:
        """Raise: there are no such values."""
        raise UnsupportedError("a plain value has an unknown type", where=repr(kind[:80]))

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return 1, having checked that the spec describes one run of bytes."""
        if spec.dtype or len(spec.shape) != 1 or spec.strides != (1,) or spec.is_parameter or spec.requires_grad:
            raise MalformedError("a byte string is described as a tensor", where=repr(spec.dtype[:80]))
        return 1

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Return the bytes."""
        assert isinstance(adopted, np.ndarray)
        return adopted[spec.offset : spec.offset + spec.shape[0]].tobytes()

    def copy_into(self, target: object, source: object) -> None:
        """Raise: bytes cannot be changed."""
        raise UsageError("a bytes object cannot be overwritten")


def share_bytes(one: TensorLeaf, other: TensorLeaf) -> bool:
    """Say whether two live tensors have an element in common; True where that is hard to tell."""
    try:
        # The work grows exponentially with the dimensions, hence the bound.
        return np.shares_memory(_shadow(one), _shadow(other), max_work=1 << 12)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _shadow(leaf: TensorLeaf) -> NDArray[np.void]:
    """Return an array with the leaf's addresses; it is compared, never read."""
    address = _Address(leaf.origin, 0, None)
    address.__array_interface__ |= {
        "shape": leaf.shape,
        "strides": leaf.byte_strides,
        "typestr": f"|V{leaf.itemsize}",
    }
    return np.asarray(address)
