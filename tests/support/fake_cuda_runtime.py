"""A fake CUDA runtime whose device memory is host memory: ``cudaMemcpyAsync`` as a function with an address."""

from __future__ import annotations

import ctypes

DEVICE_TO_HOST = 2
CudaMemcpyAsync = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)


class FakeCudaRuntime:
    """Copies immediately, and records the calls; fails, or copies other bytes, when a test says so."""

    def __init__(self):
        self.calls = []
        self.problem = 0
        self.fails_after = None
        self.shift = 0
        # The function lives as long as this does.
        self._function = CudaMemcpyAsync(self._copy)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _copy(self, destination, source, nbytes, kind, stream):
        if self.fails_after is not None and len(self.calls) >= self.fails_after:
            return self.problem
        self.calls.append((source, destination, nbytes, kind, stream))
        ctypes.memmove(destination, source + self.shift, nbytes - self.shift)
        return 0
