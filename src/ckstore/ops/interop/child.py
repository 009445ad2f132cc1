"""The child that loads what others wrote: it answers jobs until its parent is gone, and can be killed at any time.

Invariants:
- It opens no store, and hands back a state by a file of memory that its parent gave it, and in no other way.
- It takes at most a few times as much memory as the file is long; what takes more fails here, and only here.

The parent's end of loading: start the child, give it jobs, and outlive whatever it meets.

Invariants:
- A child that crashes, is killed, or is silent for too long is an error of the file it was loading; the next file gets
  a new one.
- The parent maps nothing of what a child hands back, and believes none of it unchecked.

What the child that loads foreign files hands back: a state in a file of memory, and the words around it.

The state's storages lie one after the other in a file without a name, then the head: tree, tensors and where the
storages lie. What comes from the child is not trusted: it read what others wrote.

Invariants:
- Every place and every tensor is checked against the file's length before a byte is read by it.
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
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ckstore import errors
from ckstore.errors import BackendError, CapacityError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.records import Count, TensorRow, decode_inner, encode_inner
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import decode_tree, encode_tree, place_of
from ckstore.ops.interop.foreign_state import Loaded, storable
from ckstore.ops.interop.plain_fields import PlainFields
from ckstore.ops.interop.storages import FileStorage, OpenFile
from ckstore.ops.interop.unpickle import read_inert
from ckstore.processes import start_python
from ckstore.state.capture import Captured, capture
from ckstore.state.tensors import HostStorage

BLOCK_NBYTES = 4 << 20
_WHERE = "what the loading process handed back"


class StorageRow(NamedTuple):
    """A storage: where its bytes lie in the file, and what they are."""

    place: Count
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
    """Asks the child to load one part of a checkpoint.

    Attributes:
        kind: How it is read.
        path: Where it is; a path may be no text.
        is_peek: Only its plain values are wanted, and no tensor.
        nbytes_max: How long it is.
        key: The key that it gets in the state; empty: it is the whole state.
        skip: Globs of leaves that are left out.
    """

    kind: str
    path: bytes
    is_peek: bool
    nbytes_max: Count
    key: str
    skip: list[str]

    @property
    def where(self) -> str:
        """The path as Python writes it."""
        return os.fsdecode(self.path)


class Answer(NamedTuple):
    """Says where the head of the state lies in the file, or what went wrong."""

    head_place: Count
    head_nbytes: Count
    error: tuple[str, str, str | None, str | None] | None


def write_parcel(loaded: Loaded, fd: int) -> tuple[int, int]:
    """Write a state into a file; return place and length of its head."""
    captured = loaded.captured
    place, rows = 0, []
    for storage in captured.storages:
        rows.append(StorageRow(place, storage.nbytes, storage.element_width, storage.is_float))
        for lo in range(0, storage.nbytes, BLOCK_NBYTES):
            place += _write_all(fd, storage.read(lo, min(lo + BLOCK_NBYTES, storage.nbytes)), place)
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
    return place, _write_all(fd, memoryview(encode_inner(head)), place)


def _write_all(fd: int, content: memoryview, place: int) -> int:
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], place + done)
    return done


def read_parcel(file: OpenFile, answer: Answer) -> Loaded:
    """Return the state that a child wrote into a file; its bytes are read when they are asked for.

    Raises:
        MalformedError: The child did not write it, or it was tampered with.
    """
    nbytes = file.nbytes
    if answer.head_place + answer.head_nbytes > nbytes:
        raise MalformedError("the head of a state lies beyond its file", where=_WHERE)
    head = decode_inner(file.read(answer.head_place, answer.head_nbytes), _Head, where=_WHERE)
    storages: list[HostStorage] = []
    for row in head.storages:
        if row.place + row.nbytes > nbytes or row.element_width not in (1, 2, 4, 8):
            raise MalformedError("a storage lies beyond its file, or has elements of an impossible width", where=_WHERE)
        storages.append(FileStorage(file, row.place, row.nbytes, row.element_width, row.is_float))
    tensors = [_spec_of(row) for row in head.tensors]
    if any(spec.storage >= len(storages) for spec in tensors):
        raise MalformedError("a tensor lies in a storage that is not there", where=_WHERE)
    # Whether tensors lie within their storages is checked when the manifest is written, as for every commit.
    tree = decode_tree(head.tree, tensor_count=len(tensors), where=_WHERE)
    return Loaded(Captured(tree, [], tensors, storages, list(head.warnings)), dict(head.left_out))


def _spec_of(row: TensorRow) -> TensorSpec:
    return TensorSpec(
        row.library, row.dtype, row.shape, row.strides, row.storage, row.offset, row.is_parameter, row.requires_grad
    )


MESSAGE_NBYTES_MAX = 64 << 10
BASE_NBYTES = 6 << 30
"""Address space of private memory that Python, torch and its threads take without a file."""

_PLAIN = (bool, int, float, str, type(None))


def serve(fd: int) -> None:
    """Answer jobs from this socket until its other end is closed."""
    # No signal of a terminal or a scheduler ends it (``children.start``): its parent does.
    with contextlib.suppress(ValueError, OSError):
        # What it loads is nobody's business but its parent's: no core dump holds it.
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
        with _bounded(job.nbytes_max):
            return Answer(*_load(job, memory), None)
    except CkstoreError as error:
        return _failed(error)
    except (MemoryError, RecursionError) as problem:
        kind = "memory" if isinstance(problem, MemoryError) else "nesting"
        return _failed(
            CapacityError(
                f"loading the file takes more {kind} than a file of its length can need", where=job.where,
                todo="it is damaged, or was made to harm; leave it out with --exclude",
            )
        )  # fmt: skip
    except OSError as problem:
        return _failed(CorruptError(f"the file cannot be read ({problem.strerror})", where=job.where))
    except Exception as problem:
        return _failed(CorruptError(f"loading the file failed ({type(problem).__name__}: {problem})", where=job.where))


def _failed(error: CkstoreError) -> Answer:
    # A path that is no text is written with its bytes.
    shown = [
        None if text is None else text.encode("utf-8", "backslashreplace").decode()
        for text in (error.what, error.where, error.todo)
    ]
    texts = [None if text is None else text[:2000] for text in shown]
    return Answer(0, 0, (error.code, texts[0] or "", texts[1], texts[2]))


@contextlib.contextmanager
def _bounded(nbytes_max: int) -> Any:
    """Bound this process's own memory, and the file that it writes, while one file is loaded."""
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
    # Imported by the first job: torch takes a second or two.
    from ckstore.state.torch_adapter import TorchAdapter

    state, fields, notes = _read(job)
    if job.is_peek:
        loaded = Loaded(capture(_plain_values(state), [TorchAdapter()]))
    else:
        loaded = storable(state, [TorchAdapter()], key=job.key, skip=job.skip, where=job.where)
        loaded.captured.warnings.extend(notes)
        loaded.left_out.update(fields.left_out | loaded.left_out)
    if loaded.captured.nbytes > job.nbytes_max:
        raise CapacityError(
            f"the tensors take {loaded.captured.nbytes} bytes, and the file has {job.nbytes_max}", where=job.where,
            todo="it is compressed, or was made to harm; load it where you trust it and save it plainly",
        )  # fmt: skip
    return write_parcel(loaded, memory)


def _read(job: Job) -> tuple[Any, PlainFields, list[str]]:
    """Return the state in a file, what became of the objects in it, and what the user should know."""
    from ckstore.ops.interop.dcp import keys_left_as_text, load_dcp
    from ckstore.ops.interop.stand_ins import StandIns
    from ckstore.ops.interop.torch_save import load_file

    stand_ins, notes = StandIns(), []
    if job.kind == "dcp":
        state = load_dcp(job.where, stand_ins, read_inert=read_inert, is_peek=job.is_peek)
        prefix = (job.key,) if job.key else ()
        notes = [
            f"The keys of {place_of((*prefix, *path))} are numbers as text: torch.distributed.checkpoint wrote them so."
            for path in keys_left_as_text(state)
        ]
    elif job.kind == "pickle":
        state = read_inert(Path(job.where).read_bytes(), where=job.where)
    else:
        state = load_file(job.where, stand_ins, is_peek=job.is_peek)
    fields = PlainFields(stand_ins.kind_of)
    state = fields.of(state, (job.key,) if job.key else ())
    if fields.notes and not fields.leaf_count and not job.key and not job.is_peek:
        raise UnsupportedError(
            f"the file holds only objects, which only code can make: {fields.notes[0]}", where=job.where,
            todo="leave the file out with --exclude, or load it where you trust it and save its state_dicts alone",
        )  # fmt: skip
    return state, fields, notes + fields.notes


def _plain_values(state: Any) -> dict[str, Any]:
    """Return the plain values that stand directly in a state: steps are found among them."""
    if not isinstance(state, dict):
        return {}
    return {key: value for key, value in state.items() if type(key) is str and type(value) in _PLAIN}


START_SECONDS = 120.0
"""For Python and torch to start, and for the smallest file."""

NBYTES_PER_SECOND_MIN = 4 << 20
"""What loads more slowly than this is taken to hang."""


class Loader:
    """Loads parts of foreign checkpoints in a child process; a context manager.

    Args:
        patience_seconds: How long a child may be silent, beyond what the length of its file explains.
    """

    def __init__(self, patience_seconds: float = START_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(
        self, kind: str, path: Path, nbytes: int, *, key: str = "", skip: Sequence[str] = (), is_peek: bool = False
    ) -> Loaded:
        """Return the state in a file, or with ``is_peek`` its plain values only.

        Args:
            kind: ``"torch"``, ``"pickle"`` or ``"dcp"``.
            path: The file, or the folder.
            nbytes: How long it is, all files of a folder together.
            key: The key that it gets in the state; empty: it is the whole state.
            skip: Globs over dotted paths of leaves that are left out.
            is_peek: Read no tensor.

        Raises:
            UnsupportedError: It holds objects that only code can make, or torch is missing or too old.
            CorruptError: It cannot be read, or loading it ended the child.
            CapacityError: Loading it takes far more memory than it is long.
        """
        memory = OpenFile(_memory_file(), str(path))
        try:
            answer = self._ask(Job(kind, os.fsencode(path), is_peek, nbytes, key, list(skip)), memory, path)
            if answer.error is not None:
                raise _error_of(answer.error)
            return read_parcel(memory, answer)
        except BaseException:
            memory.close()
            raise

    @property
    def child_pid(self) -> int | None:
        """The process of the child; None: none was started, or the last one has ended."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the child; repeated calls do nothing."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            # It loads what nobody waits for any more; there is nothing for it to finish.
            process.kill()
            process.wait()

    def _ask(self, job: Job, memory: OpenFile, path: Path) -> Answer:
        channel = self._started()
        seconds = self.patience_seconds + job.nbytes_max / NBYTES_PER_SECOND_MIN
        try:
            socket.send_fds(channel, [encode_inner(job)], [memory.fileno])
            poll = select.poll()
            poll.register(channel, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise _ended(path, f"was silent for {seconds:.0f} seconds, and was killed")
            answer = channel.recv(MESSAGE_NBYTES_MAX)
        except OSError:
            answer = b""
        except BaseException:
            self.close()
            raise
        if not answer:
            raise _ended(path, self._how_it_ended())
        return decode_inner(answer, Answer, where=path)

    def _how_it_ended(self) -> str:
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

    def _started(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = start_python(
                    ["-m", "ckstore.ops.interop"],
                    fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as problem:
                ours.close()
                raise BackendError(f"the process that loads files cannot be started ({problem})") from None
        self._channel = ours
        return ours


def _memory_file() -> int:
    try:
        return os.memfd_create("ckstore-import", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        raise UnsupportedError("this system has no files of memory", todo="import on a Linux machine") from None


def _ended(path: Path, how: str) -> CkstoreError:
    return CorruptError(
        f"the process that loaded the file {how}", where=path,
        todo="it is damaged, was made to harm, or is too large for this machine's memory; --exclude leaves it out",
    )  # fmt: skip


_KINDS: dict[str, type[CkstoreError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkstoreError) and kind is not CkstoreError
}


def _error_of(told: tuple[str, str, str | None, str | None]) -> CkstoreError:
    code, what, where, todo = told
    kind = _KINDS.get(code)
    if kind is None:
        raise MalformedError("the loading process told of an unknown error", where=repr(code)[:80])
    return kind(what, where=where, todo=todo)
