"""The one function of CUDA's runtime that is called without torch.

A state has hundreds of tensors, and telling torch of a copy takes tens of microseconds of the interpreter for each, in
which a trainer that runs Python waits (``stall_gpu_guarded``). The runtime is told of many in one call, which the
interpreter is not needed for.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ckstore import kernels
from ckstore.logs import tell

_log = logging.getLogger("ckstore")

_DEVICE_TO_HOST = 2
"""``cudaMemcpyDeviceToHost``."""

_PATTERN_NBYTES = 256


class Launcher:
    """Begins copies from one device to the host.

    Args:
        function: The address of ``cudaMemcpyAsync``.
        device: Where from.
        stream: A stream of that device, as the runtime knows it.
    """

    def __init__(self, function: int, device: torch.device, stream: int) -> None:
        self._function = function
        self._device = device
        self._stream = stream

    def launch(self, table: NDArray[np.uint64]) -> None:
        """Begin the copies of some rows: source address, destination address, length.

        Raises:
            RuntimeError: The runtime has refused one; those after it were not begun.
        """
        problem = kernels.launch_copies(self._function, table.data, _DEVICE_TO_HOST, self._stream)
        if problem:
            forget_error(self._device)
            raise RuntimeError(f"cudaMemcpyAsync has refused a copy: {_text_of(problem)}")


def launcher_for(device: torch.device, stream: torch.cuda.Stream) -> Launcher | None:
    """Return what begins copies on a stream; None where only torch can.

    It has copied a pattern, in two parts, before it is returned: whatever is not as it should be costs time, not bytes.
    The device must be the current one, and the stream its current stream; it is waited for.
    """
    function = address_of_copy()
    if function is None:
        return None
    found = Launcher(function, device, stream.cuda_stream)
    try:
        problem = None if _copies(found, device, stream) else "it has copied other bytes than torch"
    except RuntimeError as error:
        problem = str(error)
    if problem is None:
        return found
    tell(_log, logging.WARNING, "copies from %s are told of one by one: %s", device, problem)
    return None


def address_of_copy() -> int | None:
    """Return where ``cudaMemcpyAsync`` lies in the runtime that torch uses; None where there is none to be seen."""
    if torch.version.cuda is None:
        # A runtime of another maker, or none.
        return None
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    try:
        # What a library was linked with is searched too: another runtime of this process may be another version.
        function = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW).cudaMemcpyAsync
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def forget_error(device: torch.device) -> None:
    """Have torch take note of the runtime's last error here: else it is raised at the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)


def _text_of(problem: int) -> str:
    """Return what the runtime says of one of its errors."""
    with contextlib.suppress(Exception):
        return str(torch.cuda.CudaError(problem))
    return f"CUDA error {problem}"


def _copies(launcher: Launcher, device: torch.device, stream: torch.cuda.Stream) -> bool:
    """Whether bytes arrive as they lie there."""
    half = _PATTERN_NBYTES // 2
    there = torch.arange(_PATTERN_NBYTES, dtype=torch.uint8, device=device)
    here, begin = np.zeros(_PATTERN_NBYTES, np.uint8), there.data_ptr()
    to = here.ctypes.data
    try:
        launcher.launch(np.array([[begin + half, to, half], [begin, to + half, half]], np.uint64))
    finally:
        # What was begun may still arrive when another one was refused, or Ctrl-C has come.
        stream.synchronize()
    return bool((here == np.roll(np.arange(_PATTERN_NBYTES), half)).all())
