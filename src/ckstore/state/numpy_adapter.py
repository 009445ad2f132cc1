"""Numpy arrays and long byte strings as leaves.

Invariants:
- An array of any dtype without objects is restored with its shape, strides and bits; the result is writable.
- A dtype is stored under a name only if ``dtype_named`` returns an equal dtype for that name.
- Nothing here copies the bytes of an array.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.format.tensors import TensorSpec, extent_of
from ckstore.state.memory import AddressRange
from ckstore.state.tensors import KnownObject, LeafBatch, Memory, TensorLeaf
from ckstore.state.values import leaf_type_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckstore.format.tiles import Box
    from ckstore.format.tree import Path, Value


_SIMPLE_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,10}(\[\d{0,9}[A-Za-z]{1,2}\])?|[<>|][mM]8")
_DTYPE_NAME_MAX = 1 << 20


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name under which a dtype is stored; the inverse of ``dtype_named``."""
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
        MalformedError: ckstore does not write such a name.
        UnsupportedError: This platform or numpy version does not have the dtype.
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


def _make_dtype(description: Any) -> np.dtype[Any]:
    if isinstance(description, str):
        # Accept only the syntax of dtype.str: numpy's own parser accepts far more.
        if _SIMPLE_DTYPE.fullmatch(description) is None:
            raise ValueError(description)
        try:
            return np.dtype(description)
        except TypeError:
            raise UnsupportedError(
                "this version of numpy does not have the dtype", where=repr(description[:80])
            ) from None
    if "base" in description:
        return np.dtype((_make_dtype(description["base"]), tuple(description["shape"])))
    layout: Any = {key: description[key] for key in ("names", "offsets", "titles", "itemsize")}
    if all(title is None for title in layout["titles"]):
        del layout["titles"]
    layout["formats"] = [_make_dtype(inner) for inner in description["formats"]]
    made: np.dtype[Any] = np.dtype(layout, align=description["aligned"] is True)
    return made


def _is_storable(dtype: np.dtype[Any]) -> bool:
    if dtype.hasobject:
        return False
    try:
        # dtype.str of a dtype from another package says void; the comparison detects this.
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
    """Arrays of exactly the type numpy.ndarray, and numpy scalars as plain values."""

    library = "numpy"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe an array; refuse subclasses and arrays of objects."""
        if not isinstance(leaf, np.ndarray):
            return None
        if type(leaf) is not np.ndarray:
            raise leaf_type_error(leaf, path, "a subclass of numpy.ndarray")
        if not _is_storable(leaf.dtype):
            raise leaf_type_error(leaf, path, f"its dtype {leaf.dtype} holds objects or is not numpy's")
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
        """Describe each: a state has few arrays."""
        rows = [description.fingerprint for leaf in leaves if (description := self.describe(leaf, ())) is not None]
        return LeafBatch(*zip(*rows, strict=True)) if len(rows) == len(leaves) else None

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return the dtype and the bytes of a scalar."""
        if not isinstance(leaf, np.generic):
            return None
        if type(leaf) is np.str_:
            # Not str(leaf), which drops trailing zeros.
            return "numpy.str_", leaf.encode("utf-8", "surrogatepass")
        if type(leaf) is np.bytes_:
            return "numpy.bytes_", bytes(leaf)
        if not _is_storable(leaf.dtype) or leaf.dtype.itemsize == 0 or type(leaf) is not leaf.dtype.type:
            raise leaf_type_error(leaf, path, f"a scalar of dtype {leaf.dtype}")
        return f"numpy.{dtype_name(leaf.dtype)}", leaf.tobytes()

    def decode_value(self, kind: str, value: Value) -> object:
        """Build the scalar."""
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
            # Copy, so that a structured scalar is writable.
            return np.frombuffer(value, dtype).copy()[0]
        except (ValueError, UnicodeDecodeError):
            raise MalformedError("a numpy scalar is malformed", where=repr(kind[:80])) from None

    def convert(self, leaf: object) -> tuple[str, object] | None:
        """Return None: all leaves are arrays or scalars."""
        return None

    def build_converted(self, name: str, state: object) -> object:
        """Raise UnsupportedError: there are no such leaves."""
        raise UnsupportedError("a leaf of numpy has an unknown type", where=repr(name[:80]))

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return the bytes of one element, after checking the dtype."""
        if spec.is_parameter or spec.requires_grad:
            raise MalformedError("a numpy array requires a gradient", where=repr(spec.dtype[:80]))
        return dtype_named(spec.dtype).itemsize

    def adopt(self, memory: NDArray[np.uint8], device: object) -> object:
        """Return the memory unchanged: arrays have no device."""
        return memory

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Build the array as a view of the memory."""
        assert isinstance(adopted, np.ndarray)
        dtype = dtype_named(spec.dtype)
        try:
            return np.ndarray(spec.shape, dtype, adopted.data, spec.offset, spec.strides)
        except (ValueError, TypeError):
            raise MalformedError("numpy cannot build such an array", where=f"{spec.dtype[:80]} {spec.shape}") from None

    def check_device(self, device: object) -> object:
        """Return None: arrays have no device."""
        return None

    def copy_into(self, target: object, source: object) -> None:
        """Overwrite the array's elements."""
        assert isinstance(target, np.ndarray)
        assert isinstance(source, np.ndarray)
        target[...] = source

    def mark_written(self, targets: Sequence[object]) -> None:
        """Do nothing: arrays have no version counter."""

    def object_of(self, item: object) -> KnownObject | None:
        """Return None: numpy has no objects with ``load_state_dict``."""
        return None

    def assemble(self, spec: TensorSpec, adopted: object) -> object:
        """Raise MalformedError: arrays are never in tiles."""
        raise MalformedError("an array is in tiles", where=repr(spec.dtype[:80]))

    takes_shards = False

    def local_parts(self, item: object) -> None:
        """Return None: arrays are whole."""
        return None

    def block_of(self, item: object, box: Box) -> object:
        """Return the view of a block of an array."""
        assert isinstance(item, np.ndarray)
        return item[tuple(slice(begin, begin + count) for begin, count in zip(*box, strict=True))]

    def empty_like(self, item: object, spec: TensorSpec) -> None:
        """Return None: arrays are whole."""
        return None


class BytesAdapter(NumpyAdapter):
    """Byte strings that are too long for the tree: stored as chunks, restored as bytes."""

    library = "bytes"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a bytes object of any length."""
        if type(leaf) is not bytes:
            return None
        array = np.frombuffer(leaf, np.uint8)
        start = _start_of(array)
        memory = Memory("cpu", start, len(leaf), start, len(leaf), leaf)
        return TensorLeaf("bytes", "", (len(leaf),), (1,), 1, 1, False, start, memory, is_writable=False)

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return None: short byte strings are plain Python values."""
        return None

    def decode_value(self, kind: str, value: Value) -> object:
        """Raise UnsupportedError: there are no such values."""
        raise UnsupportedError("a plain value has an unknown type", where=repr(kind[:80]))

    def itemsize_of(self, spec: TensorSpec) -> int:
        """Return 1, after checking that the spec describes one run of bytes."""
        if spec.dtype or len(spec.shape) != 1 or spec.strides != (1,) or spec.is_parameter or spec.requires_grad:
            raise MalformedError("a byte string is described as a tensor", where=repr(spec.dtype[:80]))
        return 1

    def build(self, spec: TensorSpec, adopted: object) -> object:
        """Return the bytes."""
        assert isinstance(adopted, np.ndarray)
        return adopted[spec.offset : spec.offset + spec.shape[0]].tobytes()

    def copy_into(self, target: object, source: object) -> None:
        """Raise UsageError: bytes cannot be changed."""
        raise UsageError("a bytes object cannot be overwritten")


def share_bytes(one: TensorLeaf, other: TensorLeaf) -> bool:
    """Say whether two live tensors share an element; True if that takes too long to find out."""
    try:
        # The work is exponential in the number of dimensions, hence the bound.
        return np.shares_memory(_address_array(one), _address_array(other), max_work=1 << 12)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _address_array(leaf: TensorLeaf) -> NDArray[np.void]:
    """Return an array with the leaf's addresses, for comparison only; its elements are never read."""
    address = AddressRange(leaf.origin, 0, None)
    address.__array_interface__ |= {
        "shape": leaf.shape,
        "strides": leaf.byte_strides,
        "typestr": f"|V{leaf.itemsize}",
    }
    return np.asarray(address)
