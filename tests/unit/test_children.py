"""Protects child processes: they get their descriptors, however this process itself was started."""

from __future__ import annotations

import subprocess
import sys


def test_descriptors_reach_a_child_without_std_streams(tmp_path):
    # New descriptors then have the numbers 0 to 2, which the child uses for its own standard streams.
    output = tmp_path / "output"
    code = f"""
import os, subprocess
from ckstore.processes import start_python
ends = [os.pipe() for _ in range(2)]
assert ends[0] == (0, 1)
child = start_python(
    ["-c", "import os, sys; [os.write(int(fd), b'here') for fd in sys.argv[1:]]"],
    fds=[write for _, write in ends],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
)
assert child.wait() == 0
assert [os.read(read, 9) for read, _ in ends] == [b"here"] * 2
open({str(output)!r}, "w").close()
"""
    subprocess.run(
        ["bash", "-c", 'exec 0<&- 1>&- 2>&-; exec "$0" -c "$1"', sys.executable, code], check=True, timeout=60
    )
    assert output.exists()
