"""Load files that torch.save wrote, with ``weights_only=True`` and nothing else; for a child process to do.

Invariants:
- A torch whose ``weights_only`` is known to be broken is refused before a file is opened.
- No class is allowed beyond torch's own list but those of numpy's plain arrays, which random states hold, and
  stand-ins, which run nothing.
- torch's advice to switch ``weights_only`` off is never passed on.
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
from ckstore.ops.interop.stand_ins import StandIns

TORCH_MIN = (2, 10)
"""Before 2.6 (CVE-2025-32434) and 2.10 (CVE-2026-24747) a file could run code in spite of ``weights_only``."""

_VERSION = re.compile(r"([0-9]+)\.([0-9]+)")
_ATTEMPTS_MAX = 200
_UNKNOWN = re.compile(r"Unsupported global: GLOBAL ([\w.]+) was not")
_NOT_A_DICT = re.compile(
    r"Can only SETITEMS? for dict.* but got <class '(?:ckstore\.ops\.interop\.stand_ins\.)?([\w.]+)'>"
)
_NOT_A_LIST = re.compile(
    r"Can only (?:append to|extend) lists, but got <class '(?:ckstore\.ops\.interop\.stand_ins\.)?([\w.]+)'>"
)
_SAVE_ANEW = "load it where you trust it and save its state_dicts with torch.save"
_FORMS = (
    ("TorchScript", "the file is a TorchScript archive: a program, and no state"),
    ("legacy .tar format", "the file is of the tar format that torch wrote before version 0.2"),
    (
        "Unsupported operand",
        "the file was pickled in a way, such as protocol 4, that torch's safe reader does not read",
    ),
    ("Can only build", "the file holds an object which only code can make"),
)
_GLOBAL = re.compile(r"(?:GLOBAL|class|function) ([\w.]+)")


def check_torch(version: str = torch.__version__) -> None:
    """Refuse a torch that may run code of a file that it loads.

    Raises:
        UnsupportedError: It is too old.
    """
    found = _VERSION.match(str(version))
    if found is None or (int(found[1]), int(found[2])) < TORCH_MIN:
        raise UnsupportedError(
            f"torch {version} may run code that is hidden in a file, in spite of weights_only=True "
            "(CVE-2025-32434, CVE-2026-24747)",
            todo=f"upgrade torch to {TORCH_MIN[0]}.{TORCH_MIN[1]} or later; safetensors files can be imported with any",
        )


def load_file(path: str, stand_ins: StandIns, *, is_peek: bool = False) -> Any:
    """Return what a file holds; with ``is_peek`` its tensors have no bytes.

    Args:
        path: The file.
        stand_ins: Takes the stand-ins of what only code can make.
        is_peek: Load no tensor.

    Raises:
        UnsupportedError: Its tensors are made by what only code can run, or it is of a form that is not read here.
        CorruptError: It cannot be read.
    """
    check_torch()
    device = "meta" if is_peek else "cpu"

    def load() -> Any:
        if path.endswith(".safetensors"):
            # torch would go by the name, and this file is one of torch.save.
            with Path(path).open("rb") as stream:
                return torch.load(stream, map_location=device, weights_only=True)
        try:
            return torch.load(path, map_location=device, weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as problem:
            # Files of before torch 1.6 are no archives, and cannot be mapped.
            if "mmap" not in str(problem):
                raise
        return torch.load(path, map_location=device, weights_only=True)

    return _loaded(load, stand_ins, path)


def load_stream(stream: BinaryIO, stand_ins: StandIns, *, where: str) -> Any:
    """Return what a stream holds; raises as ``load_file`` does."""
    check_torch()

    def load() -> Any:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=True)

    return _loaded(load, stand_ins, where)


def _loaded(load: Callable[[], Any], stand_ins: StandIns, where: str) -> Any:
    """Load, again and again while torch names another class that it does not know: each gets a stand-in."""
    with _said(where, stand_ins):
        for _ in range(_ATTEMPTS_MAX):
            with torch.serialization.safe_globals([*_numpy_globals(), *stand_ins.allowed]):
                try:
                    return load()
                except Exception as problem:
                    if not _stands_in(str(problem), stand_ins):
                        raise
        raise UnsupportedError(f"the file holds objects of more than {_ATTEMPTS_MAX} classes", where=where)


def _stands_in(text: str, stand_ins: StandIns) -> bool:
    """Make the stand-in that torch misses; False: what it says is of another kind."""
    takes_pairs, takes_items = _NOT_A_DICT.search(text), _NOT_A_LIST.search(text)
    if takes_pairs is not None:
        return stand_ins.turn_into(OrderedDict, takes_pairs[1])
    if takes_items is not None:
        return stand_ins.turn_into(list, takes_items[1])
    unknown = _UNKNOWN.search(text)
    if unknown is None:
        return False
    # torch leaves out the module of what Python itself has.
    return stand_ins.add(unknown[1] if "." in unknown[1] else f"builtins.{unknown[1]}")


@contextlib.contextmanager
def _said(where: str, stand_ins: StandIns) -> Iterator[None]:
    """Turn what torch raises into errors that say what to do; torch's own advice is to run the code of the file."""
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
        # torch's own words for a failed allocation, which is no MemoryError there.
        if "can't allocate memory" in text or "not enough memory" in text:
            raise _no_memory(where) from None
        found = _GLOBAL.search(text)
        if "nsupported" in text and ("global" in text.lower() or "class" in text) and found is not None:
            raise _only_code(found[1], where) from None
        if len(stand_ins):
            raise _only_code(", ".join(stand_ins.names), where) from None
        for words, what in _FORMS:
            if words in text:
                raise UnsupportedError(what, where=where, todo=_SAVE_ANEW) from None
        raise CorruptError(
            f"torch cannot read the file: {_reason(text) or type(problem).__name__}", where=where,
            todo="leave it out with --exclude, or bring it back from a copy",
        ) from None  # fmt: skip


def _only_code(names: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"the file holds an object of {names}, which only code can make",
        where=where,
        todo="leave the file out with --exclude, or load it where you trust it and save its state_dicts alone",
    )


def _reason(text: str) -> str:
    """Return what torch says of a file, without what it advises."""
    _, mark, reason = text.partition("WeightsUnpickler error:")
    lines = [line for line in (reason if mark else text).splitlines() if line.strip()]
    return "" if not lines or "weights_only" in lines[0] else lines[0].strip()[:300]


def _no_memory(where: str) -> CapacityError:
    return CapacityError(
        "loading the file takes far more memory than it is long", where=where,
        todo="it is damaged, or was made to harm; leave it out with --exclude",
    )  # fmt: skip


def _numpy_globals() -> list[Any]:
    """Return what numpy's arrays are made by: random states hold such, and transformers allows the same."""
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core
    dtypes = {type(np.dtype(name)) for name in ("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *sorted(dtypes, key=repr)]
