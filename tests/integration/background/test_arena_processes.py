"""Protects the memory that trainer and saver share, across processes and with resource limits."""

from __future__ import annotations

import errno
import subprocess
import sys

from ckstore.background.arena import STAGING, UNIT_NBYTES
from support.saver_harness import SOURCE


def run_python(code, *fds):
    """Run code in a process that has these descriptors; return what it printed."""
    program = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, fds)], pass_fds=fds, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_other_process_sees_bytes_marks_and_state(arena):
    slot = arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.start(7, 2 * UNIT_NBYTES)
    slot.view(UNIT_NBYTES - 3, 6)[:] = b"abcdef"
    slot.mark(0, UNIT_NBYTES)
    seen = run_python(
        """
from ckstore.background.arena import Arena, UNIT_NBYTES
slot = Arena.attach(int(sys.argv[1])).slots[0]
print(slot.ticket, slot.state, slot.nbytes == 2 * UNIT_NBYTES, bytes(slot.view(UNIT_NBYTES - 3, 6)))
print(slot.is_staged(0, UNIT_NBYTES), slot.is_staged(0, UNIT_NBYTES + 1))
slot.view(0, 3)[:] = b"xyz"
""",
        arena.fd,
    )
    assert seen.splitlines() == [f"7 {STAGING} True b'abcdef'", "True False"]
    assert bytes(slot.view(0, 3)) == b"xyz"


def test_address_space_limit_leaves_slot_unchanged():
    reported = run_python(
        """
import resource
from ckstore.errors import CapacityError
from ckstore.background.arena import Arena, UNIT_NBYTES
arena = Arena.create(UNIT_NBYTES)
slot = arena.slots[0]
slot.view(0, 4)[:] = b"here"
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    slot.reserve(1 << 30)
except CapacityError as error:
    print(slot.nbytes == UNIT_NBYTES, bytes(slot.view(0, 4)), error.errno)
"""
    )
    assert reported == f"True b'here' {errno.ENOMEM}"


def test_file_size_limit_is_an_error():
    reported = run_python(
        """
import resource
from ckstore.errors import CapacityError
from ckstore.background.arena import Arena
arena = Arena.create()
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20,) * 2)
try:
    arena.slots[0].reserve(1 << 30)
except CapacityError as error:
    print(error.errno)
"""
    )
    assert reported == str(errno.EFBIG)
