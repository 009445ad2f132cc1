"""A restored state as a file that needs no store: ``.pt`` for torch.load, ``.npz`` for numpy.load.

Invariants:
- What cannot be in the file, and what was changed so that it can, is told; nothing is dropped in silence.
- A ``.pt`` file can be read with ``weights_only=True``, which was tried before the file gets its name.

A file that a user asked for, outside the store: it appears whole and durable, or not at all.

Invariants:
- What has the name already is replaced only when that was asked for; a symbolic link is never followed.
- The draft is in the same folder, made with O_EXCL, and gone when this raises. Its mode is what the umask leaves of
  0666, as of any file that a program writes for its user.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
import sys
import zipfile
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ckstore.errors import LeafTypeError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.tree import Path as KeyPath
from ckstore.format.tree import format_path, place_of
from ckstore.hashing import new_token
from ckstore.io.syscalls import medium_errors
from ckstore.state.named_types import StandIn
from ckstore.state.standard_types import take_standard

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def check_target(target: Path, *, force: bool) -> None:
    """Refuse early what ``new_file`` would refuse after hours of reading.

    Raises:
        NotFoundError: There is no such folder.
        UsageError: The name is taken and ``force`` is False, or is a folder.
        BackendError: This user may not search the folder, or the name is too long.
    """
    with medium_errors(target, "looking at a file"):
        if not target.parent.is_dir():
            raise NotFoundError("there is no such folder", where=target.parent, todo="make it first")
        if target.is_dir() and not target.is_symlink():
            raise UsageError("the target is a folder", where=target, todo="name a file in it")
        if not force and os.path.lexists(target):
            raise _taken(target)


def _taken(target: Path) -> UsageError:
    return UsageError("the file exists already", where=target, todo="choose another name, or overwrite it with --force")


@contextmanager
def new_file(target: Path, *, force: bool = False) -> Iterator[BinaryIO]:
    """Give a draft to write to; when the block ends well, it is durable under its name.

    Args:
        target: The file to make.
        force: Replace what has the name.

    Raises:
        UsageError: The name is taken and ``force`` is False.
        CapacityError: The disk is full; nothing has the name.
        BackendError: The medium failed.
    """
    check_target(target, force=force)
    draft = target.with_name(f".ckstore-{new_token()}.draft")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with medium_errors(target, "writing a file"):
            with os.fdopen(_new(draft, flags), "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _give_name(draft, target, force=force)
            _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _new(draft: Path, flags: int) -> int:
    try:
        return os.open(draft, flags, 0o666)
    except FileNotFoundError:
        raise NotFoundError("this folder takes no files", where=draft.parent, todo="name another folder") from None


def _give_name(draft: Path, target: Path, *, force: bool) -> None:
    if force:
        draft.replace(target)
        return
    try:
        # A rename would silently replace a file that was made meanwhile.
        os.link(draft, target, follow_symlinks=False)
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check_target(target, force=False)
        draft.replace(target)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_CHOOSE = "choose other leaves with --only"
SUFFIXES = (".pt", ".pth", ".npz")

_REPLACED: dict[type, type[Any]] = {defaultdict: dict, frozenset: set, deque: list}
"""Types that torch.load(weights_only=True) refuses, and those of the same content that it reads."""


def check_suffix(target: Path) -> None:
    """Refuse a name that does not say which format is meant, and torch's where there is no torch."""
    if target.suffix not in SUFFIXES:
        raise UsageError(
            "the name must end in .pt or .pth (for torch.load) or .npz (for numpy.load)",
            where=target,
            todo="for safetensors use `ckstore export`",
        )
    if target.suffix != ".npz" and importlib.util.find_spec("torch") is None:
        raise UnsupportedError("torch is not installed, and writes such files", where=target, todo="install torch")


def write_state(state: Any, target: Path, *, force: bool = False) -> dict[str, str]:
    """Write a state in the format that the name asks for, whole and durable or not at all.

    Returns:
        Dotted path -> what became of the leaf, for each that is not in the file as it was in the state.

    Raises:
        UsageError: The file exists, or the state holds what the format cannot.
        UnsupportedError: ``.pt`` was asked for and torch is not installed.
    """
    check_suffix(target)
    with new_file(target, force=force) as file:
        return _write_npz(state, file) if target.suffix == ".npz" else _write_pt(state, file)


def named_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted path.

    Raises:
        UsageError: Two leaves have one dotted path, or a path is no Unicode.
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
            raise UsageError("the path of a leaf is no Unicode", where=repr(name)) from None
        seen.add(name)
        yield name, leaf


def _leaves(state: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(state, Mapping):
        for key, child in state.items():
            yield from _leaves(child, (*path, key))
    elif type(state) in (list, tuple):
        for index, child in enumerate(state):
            yield from _leaves(child, (*path, index))
    elif (inside := _inside(state)) is not None:
        yield from _leaves(inside, path)
    else:
        yield path, state


def _inside(leaf: Any) -> dict[Any, Any] | list[Any] | tuple[Any, ...] | None:
    """Return what an object that other libraries cannot read is made of, if that is more than one plain value."""
    state = _simpler(leaf)
    return state if type(state) in (dict, list, tuple) else None


def _simpler(leaf: Any) -> Any:
    """Return the state of an object of Python's own, or its value, for a file that holds plain values only; or None."""
    if isinstance(leaf, StandIn):
        return leaf.content
    try:
        taken = take_standard(leaf)
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
                notes[name] = f"left out: a {type(leaf).__name__} that numpy.load cannot read"
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
        raise _refusal(changed)
    file.seek(0, 2)
    return notes


def _is_readable(file: BinaryIO) -> bool:
    import torch

    file.seek(0)
    try:
        # Meta tensors have no bytes: only the structure is read.
        torch.load(file, map_location="meta", weights_only=True)
    except Exception:
        # What torch says here is advice to switch its protection off.
        return False
    return True


def _refusal(state: Any) -> UsageError:
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
    """Return the state with numpy's arrays and scalars as torch's tensors and Python's numbers."""
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
        made = state.copy()
        made.clear()
        made.update(converted)
        if hasattr(state, "_metadata"):
            made._metadata = state._metadata  # type: ignore[attr-defined]
        return made
    if type(state) in (list, tuple):
        items = [_for_torch(child, (*path, index), notes) for index, child in enumerate(state)]
        return state if all(new is old for new, old in zip(items, state, strict=True)) else type(state)(items)
    return _leaf_for_torch(state, path, notes)


def _key_for_torch(key: Any, path: KeyPath, notes: dict[str, str]) -> Any:
    if _simpler(key) is None:
        return key
    notes[format_path((*path, str(key)))] = f"its key is a {type(key).__name__}, written as text"
    return str(key)


def _leaf_for_torch(leaf: Any, path: KeyPath, notes: dict[str, str]) -> Any:
    import numpy as np
    import torch

    if isinstance(leaf, torch.Generator):
        notes[format_path(path)] = "a generator of random numbers, written as its state"
        return leaf.get_state()
    if not isinstance(leaf, set | bytearray) and (state := _simpler(leaf)) is not None:
        notes[format_path(path)] = f"a {type(leaf).__name__}, written as what it is made of"
        return _for_torch(state, path, notes)
    if isinstance(leaf, np.generic):
        notes[format_path(path)] = f"a numpy scalar ({leaf.dtype}), written as a number of Python"
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
