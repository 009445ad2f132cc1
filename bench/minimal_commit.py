"""About the minimum work of a commit during training: copy the state once, and hash as many bytes in another process.

Every store with consistent, content-addressed states does at least this. A durable one also writes the bytes. A
compressing one also encodes them (here with the coder of ``fast``, without a base) and writes the result. Nothing else
is done: no base is read, and nothing is verified, packed or published. The slowdown of training is due to shared cores,
caches, memory and disk.
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
"""The default nice value of the saver."""


class MinimalCommit:
    """Copies tensors into one reused buffer while another process hashes as many bytes of its own.

    Args:
        tensors: What is copied; contiguous, and neither moved nor freed while this object is in use.
        is_coded: The process also encodes the bytes as ``fast`` does, on one thread.
        path: The process also writes the bytes, or the encoded ones, durably to this file. The file is created, and
            removed at the end. None: it writes nothing.
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
        # Whole pages, because O_DIRECT requires that.
        self._work_nbytes = -(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        command = [
            sys.executable,
            "-m",
            "bench.work_process",
            f"--nbytes={self._work_nbytes}",
            f"--piece={PIECE_NBYTES}",
        ]
        command += (["--code"] if is_coded else []) + ([f"--write={path.resolve()}"] if path is not None else [])
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        self.writes_by = self._read_line()
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """The id of the other process."""
        return self._process.pid

    @property
    def copied(self) -> bytes:
        """The bytes that were copied last."""
        return self._buffer.tobytes()

    def begin(self) -> Callable[[], float]:
        """Start both; the returned function waits for their end and returns the stall of the caller, always 0."""
        thread = self._thread = threading.Thread(target=self._copy, name="floor-copy")
        thread.start()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(b"\n")
        stdin.flush()

        def finish() -> float:
            thread.join()
            self._expect(str(self._work_nbytes))
            return 0.0

        return finish

    def is_over(self) -> bool:
        """Return whether both have ended, without waiting."""
        line, _, _ = select.select([self._process.stdout], [], [], 0)
        return bool(line) and self._thread is not None and not self._thread.is_alive()

    def _copy(self) -> None:
        for target, source in self._pieces:
            np.copyto(target, source)

    def _expect(self, word: str) -> None:
        if (line := self._read_line()) != word:
            raise RuntimeError(f"the work process reported {line!r} instead of {word!r}")

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError("the work process has died")
        return line

    def __enter__(self) -> MinimalCommit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._pieces.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
