"""Load foreign files in a child process: `Loader` in the parent, `serve` in the child, and the messages between them.

The parent sends a `Job` and a memory file. The child loads the file with torch. It writes the bytes of all storages to
the memory file, then a head with tree, tensors and storage offsets. Then it sends an `Answer`. The parent reads tensors
from the memory file when the commit needs them.

Invariants:
- The child opens no store. Its only outputs are the memory file and the answer.
- The child's memory is limited to a few times the length of the file. Exceeding the limit is an error of that file.
- A child that crashes, is killed or hangs is an error of the file it was loading. The next file gets a new child.
- The parent does not trust the child, which read foreign data. Every offset is checked against the file's length before
  it is used, and nothing is mapped.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ckstore import errors
from ckstore.errors import BackendError, CapacityError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import decode_tree, encode_tree, place_of
from ckstore.ops.interop.foreign_state import FileStorage, LoadedState, OpenFile, capture_storable
from ckstore.ops.interop.plain_fields import PlainFields
from ckstore.ops.interop.unpickle import StandIns, read_inert
from ckstore.processes import start_python
from ckstore.state.capture import Captured, capture
from ckstore.state.tensors import HostStorage

BLOCK_NBYTES = 4 << 20
_WHERE = "the answer of the loading process"


class StorageRow(NamedTuple):
    """A storage in the memory file."""

    offset: Count
    nbytes: Count
    element_width: Count
    is_float: bool


class _Head(NamedTuple):
    tree: bytes
    tensors: list[TensorRow]
    storages: list[StorageRow]
    warnings: list[str]
    left_out: list[tuple[str, str]]


class Job(NamedTuple):
    """The request to load one file or folder.

    Attributes:
        kind: ``"torch"``, ``"pickle"`` or ``"dcp"``.
        path: Its path as bytes, because a path may not be valid text.
        values_only: Return its plain values and no tensor.
        nbytes_max: Its length, which limits the bytes of its tensors.
        key: Its key in the whole state; empty if it is the whole state.
        skip: Globs of leaves that are left out.
    """

    kind: str
    path: bytes
    values_only: bool
    nbytes_max: Count
    key: str
    skip: list[str]

    @property
    def where(self) -> str:
        """The path as Python writes it."""
        return os.fsdecode(self.path)


class Answer(NamedTuple):
    """The location of the head in the memory file, or an error: code, what, where, todo."""

    head_offset: Count
    head_nbytes: Count
    error: tuple[str, str, str | None, str | None] | None


def write_state(loaded: LoadedState, fd: int) -> tuple[int, int]:
    """Write a state to the memory file; return offset and length of its head."""
    captured = loaded.captured
    offset, rows = 0, []
    for storage in captured.storages:
        rows.append(StorageRow(offset, storage.nbytes, storage.element_width, storage.is_float))
        for lo in range(0, storage.nbytes, BLOCK_NBYTES):
            offset += _write_all(fd, storage.read(lo, min(lo + BLOCK_NBYTES, storage.nbytes)), offset)
    head = _Head(
        tree=encode_tree(captured.tree),
        tensors=[
            TensorRow(
                library=spec.library,
                dtype=spec.dtype,
                shape=spec.shape,
                strides=spec.strides,
                storage=spec.storage,
                offset=spec.offset,
                is_parameter=spec.is_parameter,
                requires_grad=spec.requires_grad,
            )
            for spec in captured.tensors
        ],
        storages=rows,
        warnings=list(captured.warnings),
        left_out=list(loaded.left_out.items()),
    )
    return offset, _write_all(fd, memoryview(encode_inner(head)), offset)


def _write_all(fd: int, content: memoryview, offset: int) -> int:
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], offset + done)
    return done


def read_state(file: OpenFile, answer: Answer) -> LoadedState:
    """Return the state in a memory file. Its bytes are read when they are needed.

    Raises:
        MalformedError: The answer or the head points outside of the file, or is malformed.
    """
    nbytes = file.nbytes
    if answer.head_offset + answer.head_nbytes > nbytes:
        raise MalformedError("the head of the state is outside of the memory file", where=_WHERE)
    head = decode_inner(file.read(answer.head_offset, answer.head_nbytes), _Head, where=_WHERE)
    storages: list[HostStorage] = []
    for row in head.storages:
        if row.offset + row.nbytes > nbytes or row.element_width not in (1, 2, 4, 8):
            raise MalformedError("a storage is outside of the memory file, or has an invalid width", where=_WHERE)
        storages.append(FileStorage(file, row.offset, row.nbytes, row.element_width, row.is_float))
    tensors = [_spec_of(row) for row in head.tensors]
    if any(spec.storage >= len(storages) for spec in tensors):
        raise MalformedError("a tensor refers to a storage that does not exist", where=_WHERE)
    # The commit checks that tensors are within their storages, when it writes the manifest.
    tree = decode_tree(head.tree, tensor_count=len(tensors), where=_WHERE)
    return LoadedState(Captured(tree, [], tensors, storages, list(head.warnings)), dict(head.left_out))


def _spec_of(row: TensorRow) -> TensorSpec:
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )


MESSAGE_NBYTES_MAX = 64 << 10
BASE_NBYTES = 6 << 30
"""Private address space that Python, torch and its threads need before a file is loaded."""

_PLAIN = (bool, int, float, str, type(None))


def serve(fd: int) -> None:
    """Answer jobs from this socket until the parent closes its end."""
    # ``processes.start_python`` lets the child ignore signals of terminals and schedulers. Only its parent ends it.
    with contextlib.suppress(ValueError, OSError):
        # No core dump may contain the loaded data.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=fd) as channel:
        while True:
            message, ancillary, _, _ = channel.recvmsg(MESSAGE_NBYTES_MAX, socket.CMSG_SPACE(array.array("i").itemsize))
            if not message:
                return
            memory = array.array("i")
            for _, _, content in ancillary:
                memory.frombytes(content)
            try:
                channel.send(encode_inner(_answer(decode_inner(message, Job), memory[0])))
            finally:
                for each in memory:
                    os.close(each)


def _answer(job: Job, memory: int) -> Answer:
    try:
        with _limited_memory(job.nbytes_max):
            return Answer(*_load(job, memory), None)
    except CkstoreError as error:
        return _answer_of(error)
    except (MemoryError, RecursionError) as problem:
        kind = "memory" if isinstance(problem, MemoryError) else "nesting"
        return _answer_of(
            CapacityError(
                f"loading the file takes more {kind} than its size explains", where=job.where,
                todo="it is damaged or malicious; leave it out with --exclude",
            )
        )  # fmt: skip
    except OSError as problem:
        return _answer_of(CorruptError(f"the file cannot be read ({problem.strerror})", where=job.where))
    except Exception as problem:
        return _answer_of(
            CorruptError(f"loading the file failed ({type(problem).__name__}: {problem})", where=job.where)
        )


def _answer_of(error: CkstoreError) -> Answer:
    # Paths that are not valid text keep their bytes as escapes.
    what, where, todo = (
        None if text is None else text.encode("utf-8", "backslashreplace").decode()[:2000]
        for text in (error.what, error.where, error.todo)
    )
    return Answer(0, 0, (error.code, what or "", where, todo))


@contextlib.contextmanager
def _limited_memory(nbytes_max: int) -> Any:
    """Limit this process's private memory and the length of files it writes, while one file is loaded."""
    wanted = {resource.RLIMIT_DATA: BASE_NBYTES + 4 * nbytes_max, resource.RLIMIT_FSIZE: 2 * nbytes_max + (64 << 20)}
    before = {limit: resource.getrlimit(limit) for limit in wanted}
    for limit, value in wanted.items():
        hard = before[limit][1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    try:
        yield
    finally:
        for limit, values in before.items():
            resource.setrlimit(limit, values)


def _load(job: Job, memory: int) -> tuple[int, int]:
    # Not at module level: the parent imports this module too, and needs no torch.
    from ckstore.state.torch_adapter import TorchAdapter

    state, fields, notes = _read(job)
    if job.values_only:
        loaded = LoadedState(capture(_plain_values(state), [TorchAdapter()]))
    else:
        loaded = capture_storable(state, [TorchAdapter()], key=job.key, skip=job.skip, where=job.where)
        loaded.captured.warnings.extend(notes)
        loaded.left_out.update(fields.left_out | loaded.left_out)
    if loaded.captured.nbytes > job.nbytes_max:
        raise CapacityError(
            f"the tensors have {loaded.captured.nbytes} bytes, the file only {job.nbytes_max}", where=job.where,
            todo="it is compressed or malicious; load it where you trust it and save it uncompressed",
        )  # fmt: skip
    return write_state(loaded, memory)


def _read(job: Job) -> tuple[Any, PlainFields, list[str]]:
    """Return the state in a file, its objects, and notes for the user."""
    from ckstore.ops.interop.torch_files import keys_left_as_text, load_dcp, load_file

    stand_ins, notes = StandIns(), []
    if job.kind == "dcp":
        state = load_dcp(job.where, stand_ins, values_only=job.values_only)
        prefix = (job.key,) if job.key else ()
        notes = [
            f"The keys of {place_of((*prefix, *path))} are numbers as text, as torch.distributed.checkpoint wrote them."
            for path in keys_left_as_text(state)
        ]
    elif job.kind == "pickle":
        state = read_inert(Path(job.where).read_bytes(), where=job.where)
    else:
        state = load_file(job.where, stand_ins, values_only=job.values_only)
    fields = PlainFields(stand_ins.containers)
    state = fields.convert(state, (job.key,) if job.key else ())
    if fields.notes and not fields.leaf_count and not job.key and not job.values_only:
        raise UnsupportedError(
            f"the file contains only objects, which only code can create: {fields.notes[0]}", where=job.where,
            todo="leave the file out with --exclude, or load it where you trust it and save only its state_dicts",
        )  # fmt: skip
    return state, fields, notes + fields.notes


def _plain_values(state: Any) -> dict[str, Any]:
    """Return the plain values at the top of a state. The step is found among them."""
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in state.items() if type(key) is str and type(value) in _PLAIN}


START_SECONDS = 120.0
"""Time for Python and torch to start and to load a small file."""

NBYTES_PER_SECOND_MIN = 4 << 20
"""A file that loads more slowly than this counts as hanging."""


class Loader:
    """Loads files of foreign checkpoints in a child process; a context manager. Used by one thread.

    Args:
        timeout_seconds: How long a child may take to answer, in addition to the time that the file's length allows.
    """

    def __init__(self, timeout_seconds: float = START_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(
        self, kind: str, path: Path, nbytes: int, *, key: str = "", skip: Sequence[str] = (), values_only: bool = False
    ) -> LoadedState:
        """Return the state in a file or folder.

        Args:
            kind: ``"torch"``, ``"pickle"`` or ``"dcp"``.
            path: The file, or the folder.
            nbytes: Its length; of a folder, the sum of its files.
            key: Its key in the whole state; empty if it is the whole state.
            skip: Globs over dotted paths of leaves that are left out.
            values_only: Return the plain values and no tensor.

        Raises:
            UnsupportedError: It contains objects that only code can create, or torch is missing or too old.
            CorruptError: It cannot be read, or loading it ended the child.
            CapacityError: Loading it takes far more memory than its size explains.
        """
        memory = OpenFile(_memory_file(), str(path))
        try:
            answer = self._ask(Job(kind, os.fsencode(path), values_only, nbytes, key, list(skip)), memory, path)
            if answer.error is not None:
                raise _error_of(answer.error)
            return read_state(memory, answer)
        except BaseException:
            memory.close()
            raise

    @property
    def child_pid(self) -> int | None:
        """The process id of the child; None if no child is running."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the child; repeated calls do nothing."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            # The child has no work to finish: nothing waits for its answer.
            process.kill()
            process.wait()

    def _ask(self, job: Job, memory: OpenFile, path: Path) -> Answer:
        channel = self._connect()
        seconds = self.timeout_seconds + job.nbytes_max / NBYTES_PER_SECOND_MIN
        try:
            socket.send_fds(channel, [encode_inner(job)], [memory.fileno])
            poll = select.poll()
            poll.register(channel, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise _ended_error(path, f"did not answer for {seconds:.0f} seconds and was killed")
            answer = channel.recv(MESSAGE_NBYTES_MAX)
        except OSError:
            answer = b""
        except BaseException:
            self.close()
            raise
        if not answer:
            raise _ended_error(path, self._exit_reason())
        return decode_inner(answer, Answer, where=path)

    def _exit_reason(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self.close()
        if code is None:
            return "closed its end of the channel"
        if code >= 0:
            return f"ended with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _connect(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = start_python(
                    ["-m", "ckstore.ops.interop.child"],
                    fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as problem:
                ours.close()
                raise BackendError(f"the process that loads foreign files cannot be started ({problem})") from None
        self._channel = ours
        return ours


def _memory_file() -> int:
    try:
        return os.memfd_create("ckstore-import", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        raise UnsupportedError("this system has no memory files (memfd)", todo="import on a Linux machine") from None


def _ended_error(path: Path, how: str) -> CkstoreError:
    return CorruptError(
        f"the process that loaded the file {how}", where=path,
        todo="it is damaged, malicious, or too large for this machine's memory; leave it out with --exclude",
    )  # fmt: skip


_KINDS: dict[str, type[CkstoreError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkstoreError) and kind is not CkstoreError
}


def _error_of(error: tuple[str, str, str | None, str | None]) -> CkstoreError:
    code, what, where, todo = error
    kind = _KINDS.get(code)
    if kind is None:
        raise MalformedError("the loading process reported an unknown error code", where=repr(code)[:80])
    return kind(what, where=where, todo=todo)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
