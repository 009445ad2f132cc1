"""A process that forks the children that crash tests kill: everything is imported once, a child starts in a few ms.

Reads one JSON job a line, answers with the child's pid, lets it go on at the line ``go``, and answers with its
exit status. The child opens the store itself: rings and threads are its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path

import ckstore
from support import crash_scenarios

CAPABILITY_VERSION = 0x20080522
CAP_IPC_LOCK = 14
IO_URING_SETUP = 425
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000


TORCH_MODULES = (
    "ckstore.state.torch_adapter",
    "ckstore.state.torch_objects",
    "ckstore.state.torch_shards",
    "ckstore.state.shard_adapters",
    "ckstore.background.cuda",
    "ckstore.background.journal",
    "ckstore.background.optimizer_guard",
    "ckstore.journal.drafting",
    "ckstore.journal.environment",
    "ckstore.journal.owned_memory",
    "ckstore.journal.recorder",
    "ckstore.journal.replay",
    "ckstore.journal.restoring",
    "ckstore.ranks.dcp_",
)


def import_everything():
    doors = tuple(f"ckstore.{name}" for name in (*ckstore._DOORS, "integrations", "run"))
    for module in pkgutil.walk_packages(ckstore.__path__, "ckstore."):
        is_entry = module.name.endswith("__main__")
        # These import torch, which has no part here, and is most of what a fork would have to copy.
        if not is_entry and not module.name.startswith(
            ("ckstore.cli", "ckstore._native", "ckstore.ops.interop", *doors, *TORCH_MODULES)
        ):
            # The module of an engine that this machine cannot have refuses to be imported.
            with contextlib.suppress(*((ImportError,) if module.name == "ckstore.io.uring_engine" else ())):
                importlib.import_module(module.name)


def restrict(refused_with, memlock_nbytes):
    """Let io_uring_setup fail with an errno, as containers do, and bound locked memory as for ordinary users."""
    libc = ctypes.CDLL(None, use_errno=True)
    if memlock_nbytes is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_nbytes, memlock_nbytes))
        header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
        held = bytearray(24)
        view = (ctypes.c_char * 24).from_buffer(held)
        assert libc.capget(header, view) == 0
        for offset in (0, 4, 8):
            word = struct.unpack_from("<I", held, offset)[0]
            struct.pack_into("<I", held, offset, word & ~(1 << CAP_IPC_LOCK))
        assert libc.capset(header, view) == 0
    if refused_with is not None:
        program = b"".join(
            struct.pack("<HBBI", *instruction)
            for instruction in (
                (0x20, 0, 0, 0),  # the number of the call
                (0x15, 0, 1, IO_URING_SETUP),
                (0x06, 0, 0, SECCOMP_RET_ERRNO | refused_with),
                (0x06, 0, 0, SECCOMP_RET_ALLOW),
            )
        )
        instructions = ctypes.create_string_buffer(program, len(program))
        header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header) == 0


def run_child(job, gate):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.read(gate, 1)
    try:
        ack = crash_scenarios.file_acks(Path(job["acks"]))
        place = job["place"]
        restrict(job.get("refuse"), job.get("memlock_nbytes"))
        if job.get("engine"):
            options = {key: job[key] for key in ("skips", "after_link", "try_direct") if key in job}
            place = crash_scenarios.backend_of(place, job["engine"], **options)
        crash_scenarios.SCENARIOS[job["scenario"]](place, ack)
        os._exit(0)
    except BaseException as error:
        crash_scenarios.file_acks(Path(job["acks"] + ".error"))("".join(traceback.format_exception(error)))
        os._exit(3)


def main():
    import_everything()
    assert "torch" not in sys.modules
    # Else every child's collector writes to what it shares with this process, and the kernel copies page after page.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        gate, key = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(key)
            run_child(job, gate)
        os.close(gate)
        print(pid, flush=True)
        sys.stdin.readline()
        os.write(key, b"g")
        os.close(key)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


main()
