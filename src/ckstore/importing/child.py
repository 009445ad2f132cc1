"""The child that loads what others wrote: it answers jobs until its parent is gone, and can be killed at any time.

Invariants:
- It opens no store, and hands back a state by a file of memory that its parent gave it, and in no other way.
- It takes at most a few times as much memory as the file is long; what takes more fails here, and only here.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import socket
from pathlib import Path
from typing import Any

from ckstore.capture import capture
from ckstore.errors import CapacityError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format.records import decode_inner, encode_inner
from ckstore.importing.inert_pickle import read_inert
from ckstore.importing.parcel import Answer, Job, write_parcel
from ckstore.importing.plain_fields import PlainFields
from ckstore.importing.storable import Loaded, storable
from ckstore.tree import place_of

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
    from ckstore.adapters.torch_state import TorchAdapter

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
    from ckstore.adapters.dcp_keys import keys_left_as_text
    from ckstore.adapters.foreign_dcp import load_dcp
    from ckstore.adapters.foreign_torch import load_file
    from ckstore.adapters.stand_ins import StandIns

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
