"""Write a restored state to a file that needs no ckstore.

`write_state` writes ``.pt`` (for torch.load) and ``.npz`` (for numpy.load), `export_safetensors` the tensors only. Both
use `new_file`, which makes a file appear complete and durable, or not at all. `stored_tensors.py` exports a checkpoint
without holding it in memory, `model_folder.py` writes folders.

Invariants:
- Nothing is dropped silently. The result lists every leaf that is changed or left out.
- A ``.pt`` file is read back with ``weights_only=True`` before it gets its name.
- A ``.safetensors`` file contains the bytes of the tensors, and each tensor once. Only big-endian arrays are converted.
- An existing file is replaced only with ``force``. Symbolic links are not followed.
- The draft is in the target's folder, opened with O_EXCL, and removed on errors. Its mode is 0666 minus the umask.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import sys
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckstore.errors import LeafTypeError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.tree import Path as KeyPath
from ckstore.format.tree import format_path, place_of
from ckstore.hashing import new_token
from ckstore.io.syscalls import medium_errors
from ckstore.ops.interop.safetensors import NUMPY_DTYPES, SAME_TENSORS, TORCH_DTYPES, encode_header
from ckstore.ops.interop.weights import check_name, without_prefix
from ckstore.results import Info
from ckstore.state.markers import PerRankValues
from ckstore.state.named_types import StandIn
from ckstore.state.standard_types import convert_standard

BLOCK_NBYTES = 64 << 20
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def check_target(target: Path, *, force: bool) -> None:
    """Refuse early what ``new_file`` would refuse after hours of reading.

    Raises:
        NotFoundError: The folder does not exist.
        UsageError: The target is a folder, or exists and ``force`` is False.
        BackendError: This user may not search the folder, or the name is too long.
    """
    with medium_errors(target, "checking the target file"):
        if not target.parent.is_dir():
            raise NotFoundError("no such folder", where=target.parent, todo="create it first")
        if target.is_dir() and not target.is_symlink():
            raise UsageError("the target is a folder", where=target, todo="name a file in it")
        if not force and os.path.lexists(target):
            raise exists_error(target)


def exists_error(target: Path) -> UsageError:
    """Return the error for a file that may not be replaced."""
    return UsageError("the file exists already", where=target, todo="choose another name, or overwrite it with --force")


@contextmanager
def new_file(target: Path, *, force: bool = False) -> Iterator[BinaryIO]:
    """Yield a draft to write to. When the block ends without an error, the file is durable under its name.

    Args:
        target: The file to create.
        force: Replace an existing file.

    Raises:
        UsageError: The file exists and ``force`` is False.
        CapacityError: The disk is full. The target is unchanged.
        BackendError: The disk failed.
    """
    check_target(target, force=force)
    draft = target.with_name(f".ckstore-{new_token()}.draft")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with medium_errors(target, "writing a file"):
            with os.fdopen(_create(draft, flags), "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            give_name(draft, target, force=force)
            sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _create(draft: Path, flags: int) -> int:
    try:
        return os.open(draft, flags, 0o666)
    except FileNotFoundError:
        raise NotFoundError("no file can be created in this folder", where=draft.parent, todo="name another") from None


def give_name(draft: Path, target: Path, *, force: bool) -> None:
    """Give a finished draft its name. The caller syncs the folder.

    Raises:
        UsageError: The target exists and ``force`` is False.
    """
    if force:
        draft.replace(target)
        return
    try:
        # os.link fails if the target exists by now; a rename would replace it.
        os.link(draft, target, follow_symlinks=False)
    except FileExistsError:
        raise exists_error(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check_target(target, force=False)
        draft.replace(target)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_CHOOSE = "choose other leaves with --only"
SUFFIXES = (".pt", ".pth", ".ckpt", ".npz")

_REPLACED: dict[type, type[Any]] = {defaultdict: dict, PerRankValues: dict, frozenset: set, deque: list}
"""Types that torch.load(weights_only=True) refuses, and types with the same content that it reads."""


def check_suffix(target: Path) -> None:
    """Refuse a name whose suffix does not choose a format, and torch's format if torch is not installed."""
    if target.suffix not in SUFFIXES:
        raise UsageError(
            "the name must end in .pt, .pth or .ckpt (for torch.load) or .npz (for numpy.load)",
            where=target,
            todo="for safetensors use `ckstore export`",
        )
    if target.suffix != ".npz" and importlib.util.find_spec("torch") is None:
        raise UnsupportedError("torch is not installed, and only it writes .pt files", where=target, todo="install it")


def write_state(state: Any, target: Path, *, force: bool = False) -> dict[str, str]:
    """Write a state in the format that the suffix chooses.

    Returns:
        Dotted path -> what changed, for each leaf that is not in the file as it was in the state.

    Raises:
        UsageError: The file exists, or the state contains something that the format cannot express.
        UnsupportedError: The target is ``.pt`` and torch is not installed.
    """
    check_suffix(target)
    with new_file(target, force=force) as file:
        return _write_npz(state, file) if target.suffix == ".npz" else _write_pt(state, file)


def named_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted path.

    Raises:
        UsageError: Two leaves have the same dotted path, or a path is not valid Unicode.
    """
    seen = set()
    for path, leaf in _leaves(state, ()):
        name = format_path(path)
        if name in seen:
            raise UsageError(
                "two leaves have the same dotted path", where=place_of(path), todo="choose one of them with --only"
            )
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError("the path of a leaf is not valid Unicode", where=repr(name)) from None
        seen.add(name)
        yield name, leaf


def _leaves(state: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(state, Mapping):
        for key, child in state.items():
            yield from _leaves(child, (*path, key))
    elif type(state) in (list, tuple):
        for index, child in enumerate(state):
            yield from _leaves(child, (*path, index))
    elif (inside := _parts_of(state)) is not None:
        yield from _leaves(inside, path)
    else:
        yield path, state


def _parts_of(leaf: Any) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
    """Return the parts of an object that other libraries cannot read; None if it has no parts."""
    state = _plain_content(leaf)
    return state if type(state) in (dict, list, tuple) else None


def _plain_content(leaf: Any) -> Any:
    """Return the plain state or value of an object of Python's own types or of a stand-in; None for other leaves."""
    if isinstance(leaf, StandIn):
        return leaf.content
    try:
        taken = convert_standard(leaf)
    except (ValueError, TypeError, ArithmeticError, AttributeError):
        return None
    return None if taken is None else taken[1]


def _write_npz(state: Any, file: BinaryIO) -> dict[str, str]:
    import numpy as np

    torch = sys.modules.get("torch")
    notes: dict[str, str] = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, leaf in named_leaves(state):
            if torch is not None and isinstance(leaf, torch.Tensor):
                raise UsageError(
                    "a torch tensor cannot be in an .npz file",
                    where=name,
                    todo="write a .pt file, use `ckstore export`, or choose other leaves with --only",
                )
            array = leaf
            if isinstance(leaf, (bool, int, float, complex, str, np.generic)):
                array = np.asarray(leaf)
            if not isinstance(array, np.ndarray) or array.dtype.hasobject:
                notes[name] = f"left out: numpy.load cannot read a {type(leaf).__name__}"
                continue
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return notes


def _write_pt(state: Any, file: BinaryIO) -> dict[str, str]:
    import torch

    notes: dict[str, str] = {}
    changed = _for_torch(state, (), notes)
    torch.save(changed, file)
    if not _is_readable(file):
        raise _unreadable_error(changed)
    file.seek(0, 2)
    return notes


def _is_readable(file: BinaryIO) -> bool:
    import torch

    file.seek(0)
    try:
        # On the meta device only the structure is read.
        torch.load(file, map_location="meta", weights_only=True)
    except Exception:
        # torch's message is not shown: it advises to switch weights_only off.
        return False
    return True


def _unreadable_error(state: Any) -> UsageError:
    """Return an error that names the first leaf that torch would refuse to read."""
    import torch

    for path, leaf in _leaves(state, ()):
        if isinstance(leaf, torch.Tensor):
            continue
        with io.BytesIO() as alone:
            torch.save(leaf, alone)
            if not _is_readable(alone):
                kind = type(leaf)
                return LeafTypeError(
                    f"a leaf of type {kind.__module__}.{kind.__qualname__} cannot be in a .pt file that "
                    "torch.load(weights_only=True) reads",
                    where=place_of(path),
                    todo=_CHOOSE,
                    path=path,
                )
    return UsageError(
        "torch.load(weights_only=True) would refuse the file",
        where="a key, or a tensor",
        todo="choose leaves with --only",
    )


def _for_torch(state: Any, path: KeyPath, notes: dict[str, str]) -> Any:
    """Return the state with torch tensors and Python numbers in place of numpy arrays and scalars."""
    if type(state) in _REPLACED:
        plain = _REPLACED[type(state)]
        notes[format_path(path)] = (
            f"a {type(state).__name__}, written as a {plain.__name__} so that weights_only=True reads the file"
        )
        state = plain(state)
    if isinstance(state, dict):
        keys = {key: _key_for_torch(key, path, notes) for key in state}
        converted = {keys[key]: _for_torch(child, (*path, key), notes) for key, child in state.items()}
        if len(converted) != len(state):
            raise UsageError("two keys of a dict would be one in a .pt file", where=place_of(path), todo=_CHOOSE)
        if all(keys[key] is key and converted[keys[key]] is child for key, child in state.items()):
            return state
        copy = state.copy()
        copy.clear()
        copy.update(converted)
        if hasattr(state, "_metadata"):
            copy._metadata = state._metadata  # type: ignore[attr-defined]
        return copy
    if type(state) in (list, tuple):
        items = [_for_torch(child, (*path, index), notes) for index, child in enumerate(state)]
        return state if all(new is old for new, old in zip(items, state, strict=True)) else type(state)(items)
    return _leaf_for_torch(state, path, notes)


def _key_for_torch(key: Any, path: KeyPath, notes: dict[str, str]) -> Any:
    if _plain_content(key) is None:
        return key
    notes[format_path((*path, str(key)))] = f"its key is a {type(key).__name__}, written as text"
    return str(key)


def _leaf_for_torch(leaf: Any, path: KeyPath, notes: dict[str, str]) -> Any:
    import numpy as np
    import torch

    if isinstance(leaf, torch.Generator):
        notes[format_path(path)] = "a random number generator, written as its state"
        return leaf.get_state()
    if not isinstance(leaf, set | bytearray) and (state := _plain_content(leaf)) is not None:
        notes[format_path(path)] = f"a {type(leaf).__name__}, written as its plain content"
        return _for_torch(state, path, notes)
    if isinstance(leaf, np.generic):
        notes[format_path(path)] = f"a numpy scalar ({leaf.dtype}), written as a Python number"
        return leaf.item()
    if not isinstance(leaf, np.ndarray):
        return leaf
    try:
        tensor = torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise LeafTypeError(
            f"a numpy array of dtype {leaf.dtype} cannot be in a .pt file",
            where=place_of(path),
            todo=_CHOOSE,
            path=path,
        ) from None
    notes[format_path(path)] = "a numpy array, written as a torch tensor so that weights_only=True reads the file"
    return tensor


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export to safetensors.

    Attributes:
        tensor_count: Number of tensors in the file.
        nbytes: Bytes of these tensors.
        shared: Path of a tensor -> path under which the same tensor is in the file.
        left_out: Path -> reason why the leaf is not in the file.
        info: The checkpoint; None: it is not known.
    """

    tensor_count: int
    nbytes: int
    shared: dict[str, str]
    left_out: dict[str, str]
    info: Info | None = None


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor to write, as safetensors describes it. Two leaves with the same identity share all their memory.

    ``number`` is its number in the manifest if it is still in the store.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    content: Callable[[], memoryview]
    identity: tuple[object, ...]
    library: str
    number: int | None = None


class StoredTensor:
    """Stands in a state for a tensor that is still in the store. It is one leaf, which a dataclass would not be."""

    __slots__ = ("item",)

    def __init__(self, item: TensorItem) -> None:
        self.item = item


def export_safetensors(
    state: Any,
    target: Path,
    *,
    force: bool = False,
    metadata: Mapping[str, str] | None = None,
    strip_prefix: str = "",
    on_progress: Callable[[int, int], None] | None = None,
    contents: Callable[[Sequence[TensorItem]], Iterator[memoryview]] | None = None,
) -> Exported:
    """Write every tensor of a state to a safetensors file, under its dotted path.

    A tensor with two paths is written under the first one. The metadata maps the other path to it, as transformers
    does.

    Args:
        state: The result of ``Store.restore``.
        target: The file.
        force: Replace an existing file.
        metadata: Strings to add to the file's metadata.
        strip_prefix: Removed from the path of every tensor.
        on_progress: Called with bytes written and bytes in total.
        contents: Yields the bytes of each tensor; None: they are in memory.

    Raises:
        NotFoundError: The state has no tensor that the format supports.
        UsageError: Two tensors have the same name, one lacks the prefix, or the file exists.
    """
    items, shared, left_out = _collect(state, strip_prefix)
    if not items:
        raise NotFoundError("there is no tensor to export", todo="`ckstore show` lists the checkpoint's tensors")
    # Wide elements first, like the format's own writer, so that every tensor is aligned.
    names = sorted(items, key=lambda name: (-items[name].itemsize, name))
    texts = {"format": "pt" if any(item.library == "torch" for item in items.values()) else "np"}
    if shared:
        texts[SAME_TENSORS] = json.dumps(shared, ensure_ascii=False)
    head = encode_header(
        [(name, items[name].dtype, items[name].shape, items[name].nbytes) for name in names],
        {**texts, **(metadata or {}), **shared},
    )
    total = sum(item.nbytes for item in items.values())
    with new_file(target, force=force) as file:
        file.write(head)
        done = 0
        ordered = [items[name] for name in names]
        for content in _contents(ordered) if contents is None else contents(ordered):
            for begin in range(0, len(content), BLOCK_NBYTES):
                done += file.write(content[begin : begin + BLOCK_NBYTES])
                if on_progress is not None:
                    on_progress(done, total)
            # It must be free before the next one is read.
            del content
    return Exported(len(items), total, shared, left_out)


def _contents(items: Sequence[TensorItem]) -> Iterator[memoryview]:
    for item in items:
        yield item.content()


def _collect(state: Any, strip_prefix: str) -> tuple[dict[str, TensorItem], dict[str, str], dict[str, str]]:
    items: dict[str, TensorItem] = {}
    written: dict[tuple[object, ...], str] = {}
    shared: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for path, leaf in named_leaves(state):
        item = item_of(leaf)
        if isinstance(item, str):
            left_out[path] = item
            continue
        name = without_prefix(path, strip_prefix)
        check_name(name)
        if item.nbytes and item.identity in written:
            shared[name] = written[item.identity]
        else:
            items[name] = item
            written[item.identity] = name
    return items, shared, left_out


def item_of(leaf: Any) -> TensorItem | str:
    """Return how to write a leaf, or why it cannot be written."""
    if isinstance(leaf, StoredTensor):
        return leaf.item
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return _torch_item(leaf)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray):
        return _numpy_item(leaf)
    return f"a plain value ({type(leaf).__name__}), not a tensor"


def _torch_item(leaf: Any) -> TensorItem | str:
    import torch

    name = str(leaf.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        return f"safetensors has no dtype {name}"
    shape = tuple(leaf.shape)
    if TORCH_DTYPES[name] == "F4":
        if not shape:
            return "safetensors has no scalars of four-bit elements"
        # torch counts pairs, the format counts elements. torch cannot copy this dtype, but its bytes.
        shape = (*shape[:-1], 2 * shape[-1])
        leaf = leaf.detach().view(torch.uint8)

    def content() -> memoryview:
        flat = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy())

    identity = ("torch", leaf.device, leaf.data_ptr(), leaf.dtype, tuple(leaf.shape), leaf.stride())
    itemsize = leaf.dtype.itemsize
    return TensorItem(TORCH_DTYPES[name], shape, itemsize, leaf.numel() * itemsize, content, identity, "torch")


def _numpy_item(leaf: Any) -> TensorItem | str:
    import numpy as np

    name = f"{leaf.dtype.kind}{leaf.dtype.itemsize}"
    if name not in NUMPY_DTYPES or leaf.dtype.fields is not None:
        return f"safetensors has no dtype {leaf.dtype}"

    def content() -> memoryview:
        flat = np.ascontiguousarray(leaf, dtype=leaf.dtype.newbyteorder("<")).reshape(-1)
        return flat.view(np.uint8).data

    address = leaf.__array_interface__["data"][0]
    identity = ("numpy", address, leaf.dtype.str, leaf.shape, leaf.strides)
    return TensorItem(NUMPY_DTYPES[name], leaf.shape, leaf.dtype.itemsize, leaf.nbytes, content, identity, "numpy")
