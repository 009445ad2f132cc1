"""Load files that torch.save wrote, only with ``weights_only=True``. Runs in the child process.

Invariants:
- A torch release with a known hole in ``weights_only`` is refused before a file is opened.
- Allowed classes are torch's own list, those of plain numpy arrays (random states contain them), and inert stand-ins.
- torch's advice to switch ``weights_only`` off is never shown.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ckstore.errors import CapacityError, CkstoreError, CorruptError, NotFoundError, UnsupportedError
from ckstore.ops.interop.unpickle import StandIn, StandIns

TORCH_MIN = (2, 10)
"""Older releases let a file run code despite ``weights_only`` (CVE-2025-32434 until 2.6, CVE-2026-24747 until 2.10)."""

_VERSION = re.compile(r"([0-9]+)\.([0-9]+)")
_ATTEMPTS_MAX = 200
# In torch's messages, the class of a stand-in has the module that created it.
_STAND_IN = rf"(?:{re.escape(StandIn.__module__)}\.)?([\w.]+)"
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL ([\w.]+) was not")
_NOT_A_DICT = re.compile(rf"Can only SETITEMS? for dict.* but got <class '{_STAND_IN}'>")
_NOT_A_LIST = re.compile(rf"Can only (?:append to|extend) lists, but got <class '{_STAND_IN}'>")
_SAVE_AGAIN = "load it where you trust it and save its state_dicts with torch.save"
_UNSUPPORTED = (
    ("TorchScript", "the file is a TorchScript archive, which is a program and not a state"),
    ("legacy .tar format", "the file has the tar format that torch wrote before version 0.2"),
    (
        "Unsupported operand",
        "the file has a pickle format, such as protocol 4, that torch's safe reader does not support",
    ),
    ("Can only build", "the file contains an object that only code can create"),
)
"""Words in a message of torch, and what they mean."""
_GLOBAL = re.compile(r"(?:GLOBAL|class|function) ([\w.]+)")


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a torch release that may run code from a file that it loads.

    Raises:
        UnsupportedError: This release is too old.
    """
    found = _VERSION.match(str(version))
    if found is None or (int(found[1]), int(found[2])) < TORCH_MIN:
        raise UnsupportedError(
            f"torch {version} may run code from a file, even with weights_only=True (CVE-2025-32434, CVE-2026-24747)",
            todo=f"upgrade torch to {TORCH_MIN[0]}.{TORCH_MIN[1]} or later; safetensors files need no torch",
        )


def load_file(path: str, stand_ins: StandIns, *, values_only: bool = False) -> Any:
    """Return the content of a file.

    Args:
        path: The file.
        stand_ins: Collects the stand-ins for classes that are not allowed.
        values_only: Give tensors no bytes.

    Raises:
        UnsupportedError: Only code could create its tensors, or the format is not supported.
        CorruptError: The file cannot be read.
    """
    check_torch()
    device = "meta" if values_only else "cpu"

    def load() -> Any:
        if path.endswith(".safetensors"):
            # Given a path, torch would choose the format by the name; this is a torch.save file.
            with Path(path).open("rb") as stream:
                return torch.load(stream, map_location=device, weights_only=True)
        try:
            return torch.load(path, map_location=device, weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as problem:
            # Files from before torch 1.6 are not archives and cannot be mapped.
            if "mmap" not in str(problem):
                raise
        return torch.load(path, map_location=device, weights_only=True)

    return _load_with_stand_ins(load, stand_ins, path)


def load_stream(stream: BinaryIO, stand_ins: StandIns, *, where: str) -> Any:
    """Return the content of a stream; raises like ``load_file``."""
    check_torch()

    def load() -> Any:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)

    return _load_with_stand_ins(load, stand_ins, where)


def _load_with_stand_ins(load: Callable[[], Any], stand_ins: StandIns, where: str) -> Any:
    """Load, and repeat with another stand-in each time torch names a class that it does not allow."""
    with _torch_errors_translated(where, stand_ins):
        for _ in range(_ATTEMPTS_MAX):
            with torch.serialization.safe_globals([*_numpy_globals(), *stand_ins.allowed]):
                try:
                    return load()
                except Exception as problem:
                    if not _add_stand_in(str(problem), stand_ins):
                        raise
        raise UnsupportedError(f"the file contains objects of more than {_ATTEMPTS_MAX} classes", where=where)


def _add_stand_in(text: str, stand_ins: StandIns) -> bool:
    """Create the stand-in that torch's message asks for; return False if the message has another subject."""
    takes_pairs, takes_items = _NOT_A_DICT.search(text), _NOT_A_LIST.search(text)
    if takes_pairs is not None:
        return stand_ins.replace_by_container(OrderedDict, takes_pairs[1])
    if takes_items is not None:
        return stand_ins.replace_by_container(list, takes_items[1])
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        return False
    # torch's message omits the module of builtins.
    return stand_ins.add(unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}")


@contextlib.contextmanager
def _torch_errors_translated(where: str, stand_ins: StandIns) -> Iterator[None]:
    """Convert torch's exceptions to errors that say what to do. torch itself advises to run the file's code."""
    try:
        yield
    except (CkstoreError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=where) from None
    except MemoryError:
        raise _no_memory(where) from None
    except Exception as problem:
        text = str(problem)
        # torch reports a failed allocation with these words, not with a MemoryError.
        if "can't allocate memory" in text or "not enough memory" in text:
            raise _no_memory(where) from None
        found = _GLOBAL.search(text)
        if "nsupported" in text and ("global" in text.lower() or "class" in text) and found is not None:
            raise _only_code(found[1], where) from None
        if len(stand_ins):
            raise _only_code(", ".join(stand_ins.names), where) from None
        for words, what in _UNSUPPORTED:
            if words in text:
                raise UnsupportedError(what, where=where, todo=_SAVE_AGAIN) from None
        raise CorruptError(
            f"torch cannot read the file: {_reason(text) or type(problem).__name__}", where=where,
            todo="leave it out with --exclude, or replace it by an undamaged copy",
        ) from None  # fmt: skip


def _only_code(names: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"the file contains an object of {names}, which only code can create",
        where=where,
        todo="leave the file out with --exclude, or load it where you trust it and save only its state_dicts",
    )


def _reason(text: str) -> str:
    """Return what torch says about a file, without its advice."""
    _, mark, reason = text.partition("WeightsUnpickler error:")
    lines = [line for line in (reason if mark else text).splitlines() if line.strip()]
    return "" if not lines or "weights_only" in lines[0] else lines[0].strip()[:300]


def _no_memory(where: str) -> CapacityError:
    return CapacityError(
        "loading the file takes far more memory than its size explains", where=where,
        todo="it is damaged or malicious; leave it out with --exclude",
    )  # fmt: skip


def _numpy_globals() -> list[Any]:
    """Return the classes and functions that create numpy arrays.

    Random states contain arrays. transformers allows the same globals.
    """
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core
    dtypes = {type(np.dtype(name)) for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *sorted(dtypes, key=repr)]
