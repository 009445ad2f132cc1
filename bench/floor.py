"""About the least that storing a state takes beside training: one copy of it, and as many bytes hashed elsewhere.

No store does with less that wants the state as it was and knows its bytes by their identity. Nothing is coded,
checked or written here. What training loses to this is the machine's affair: both use its cores, caches and memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

import numpy as np
import torch

PIECE_NBYTES = 4 << 20
NICENESS = 19
"""That of the saver, unless one asks for another."""

_HASHING = """
import sys
import numpy as np
from blake3 import blake3

held = np.random.default_rng(0).integers(0, 256, int(sys.argv[1]), np.uint8).data
print("ready", flush=True)
for _ in sys.stdin:
    pieces = [held[begin : begin + int(sys.argv[2])] for begin in range(0, len(held), int(sys.argv[2]))]
    print(sum(len(piece) for piece in pieces if blake3(piece).digest()), flush=True)
"""


class Floor:
    """Copies tensors into one buffer that is used again, and has a process hash as many bytes of its own.

    Args:
        tensors: What is copied; contiguous, and neither moved nor freed as long as this lives.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        sources = [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors if tensor.numel()]
        self.nbytes = sum(source.nbytes for source in sources)
        self._buffer = np.zeros(self.nbytes, np.uint8)
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []
        position = 0
        for source in sources:
            for begin in range(0, source.nbytes, PIECE_NBYTES):
                piece = source[begin : begin + PIECE_NBYTES]
                self._pieces.append((self._buffer[position : position + piece.nbytes], piece))
                position += piece.nbytes
        command = [sys.executable, "-c", _HASHING, str(self.nbytes), str(PIECE_NBYTES)]
        self._hashing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._heard("ready")
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """Of the process that hashes."""
        return self._hashing.pid

    @property
    def copied(self) -> bytes:
        """What was copied last."""
        return self._buffer.tobytes()

    def begin(self) -> Callable[[], float]:
        """Begin both; what is returned waits for their end, and returns for how long the caller was stalled: never."""
        thread = threading.Thread(target=self._copy, name="floor-copy")
        thread.start()
        stdin = self._hashing.stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.flush()

        def finish() -> float:
            thread.join()
            self._heard(str(self.nbytes))
            return 0.0

        return finish

    def _copy(self) -> None:
        for target, source in self._pieces:
            np.copyto(target, source)

    def _heard(self, word: str) -> None:
        assert self._hashing.stdout is not None
        said = self._hashing.stdout.readline().decode().strip()
        if said != word:
            raise RuntimeError(f"the process that hashes said {said!r} instead of {word!r}")

    def __enter__(self) -> Floor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashing.kill()
        self._hashing.communicate()
        self._pieces.clear()
