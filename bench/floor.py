"""About the least that storing a state takes beside training: one copy of it, and as many bytes hashed elsewhere.

No store does with less that wants the state as it was and knows its bytes by their identity; one that is to be durable
writes them too, one that compresses codes them (here by the coder of ``fast``, whole) and writes what that leaves.
Nothing else is done: no base is read, nothing is checked, packed or published. What training loses to this is the
machine's affair: both use its cores, caches, memory and disk.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

PIECE_NBYTES = 4 << 20
NICENESS = 19
"""That of the saver, unless one asks for another."""


class Floor:
    """Copies tensors into one buffer that is used again, and has a process hash as many bytes of its own.

    Args:
        tensors: What is copied; contiguous, and neither moved nor freed as long as this lives.
        is_coded: The process codes them too, as ``fast`` does, on one thread.
        path: It writes them too, or as many as coding leaves, durably, over this file, which is made, and removed at
            the end; None: nowhere.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, is_coded: bool = False, path: Path | None = None) -> None:
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
        self._thread: threading.Thread | None = None
        self._path = path
        # Whole pages, as O_DIRECT asks.
        self._beside_nbytes = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        command = [sys.executable, "-m", "bench.beside", f"--nbytes={self._beside_nbytes}", f"--piece={PIECE_NBYTES}"]
        command += (["--code"] if is_coded else []) + ([f"--write={path.resolve()}"] if path is not None else [])
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        self.writes_by = self._said()
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """Of the process beside."""
        return self._process.pid

    @property
    def copied(self) -> bytes:
        """What was copied last."""
        return self._buffer.tobytes()

    def begin(self) -> Callable[[], float]:
        """Begin both; what is returned waits for their end, and returns for how long the caller was stalled: never."""
        thread = self._thread = threading.Thread(target=self._copy, name="floor-copy")
        thread.start()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.flush()

        def finish() -> float:
            thread.join()
            self._heard(str(self._beside_nbytes))
            return 0.0

        return finish

    def is_over(self) -> bool:
        """Return whether what was begun has ended, without waiting."""
        said, _, _ = select.select([self._process.stdout], [], [], 0)
        return bool(said) and self._thread is not None and not self._thread.is_alive()

    def _copy(self) -> None:
        for target, source in self._pieces:
            np.copyto(target, source)

    def _heard(self, word: str) -> None:
        if (said := self._said()) != word:
            raise RuntimeError(f"the process beside said {said!r} instead of {word!r}")

    def _said(self) -> str:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().decode().strip()
        if not said:
            raise RuntimeError("the process beside has died")
        return said

    def __enter__(self) -> Floor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._pieces.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
