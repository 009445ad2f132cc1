"""Programs that replace savers: they send invalid messages, or serve with a fault."""

from __future__ import annotations

import sys

_SERVING = """
import runpy
sys.argv[1:] = sys.argv[3:]
runpy.run_module("ckstore.background.saver", run_name="__main__", alter_sys=True)
"""


class AlteredSavers:
    """Starts a program wherever a saver is to be started.

    A program finds the socket to its trainer in ``channel``.
    """

    def __init__(self, monkeypatch, folder):
        self._monkeypatch, self._folder = monkeypatch, folder

    def run(self, program):
        """Run a program and nothing else."""
        path = self._folder / "altered-saver"
        # With -S nothing of this environment is imported: it starts immediately.
        first = f"#!{sys.executable} -S" if "runpy" not in program else f"#!{sys.executable}"
        path.write_text(f"{first}\nimport os, sys, time\nchannel = int(sys.argv[3])\n{program}\n")
        path.chmod(0o700)
        self._monkeypatch.setattr(sys, "executable", str(path))

    def serve(self, prelude):
        """Run a few lines, and then a saver, in one process."""
        self.run(prelude + _SERVING)

    def run_once(self, program):
        """Run a program in the place of the next saver; those that come after it are savers."""
        marker = self._folder / "was-run"
        self.run(f"""
try:
    os.close(os.open({str(marker)!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
{program}
""")
