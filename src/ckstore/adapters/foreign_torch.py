"""Load files that torch.save wrote, with ``weights_only=True`` and nothing else; for a child process to do.

Invariants:
- A torch whose ``weights_only`` is known to be broken is refused before a file is opened.
- No class is allowed beyond torch's own list but those of numpy's plain arrays, which random states hold.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from ckstore.errors import CapacityError, CkstoreError, CorruptError, NotFoundError, UnsupportedError

TORCH_MIN = (2, 10)
"""Before 2.6 (CVE-2025-32434) and 2.10 (CVE-2026-24747) a file could run code in spite of ``weights_only``."""

_VERSION = re.compile(r"([0-9]+)\.([0-9]+)")
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


def load_file(path: str, *, is_peek: bool = False) -> Any:
    """Return what a file holds; with ``is_peek`` its tensors have no bytes.

    Raises:
        UnsupportedError: It holds objects that only code can make.
        CorruptError: It cannot be read.
    """
    check_torch()
    device = "meta" if is_peek else "cpu"
    with _said(path), torch.serialization.safe_globals(_numpy_globals()):
        try:
            return torch.load(path, map_location=device, weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as problem:
            # Files of before torch 1.6 are no archives, and cannot be mapped.
            if "mmap" not in str(problem):
                raise
        return torch.load(path, map_location=device, weights_only=True)


def load_stream(stream: BinaryIO, *, where: str) -> Any:
    """Return what a stream holds; raises as ``load_file`` does."""
    check_torch()
    with _said(where), torch.serialization.safe_globals(_numpy_globals()):
        return torch.load(stream, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def _said(where: str) -> Iterator[None]:
    """Turn what torch raises into errors that say what to do."""
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
            raise UnsupportedError(
                f"the file holds an object of {found[1]}, which only code can make",
                where=where,
                todo="leave the file out with --exclude, or load it where you trust it and save its state_dicts alone",
            ) from None
        raise CorruptError(
            f"torch cannot read the file: {(text.splitlines() or [type(problem).__name__])[0][:300]}", where=where,
            todo="leave it out with --exclude, or bring it back from a copy",
        ) from None  # fmt: skip


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
