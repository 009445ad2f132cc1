"""Protects memory: the native loops run under the address and undefined-behaviour sanitizers, hostile payloads too."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "native"
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# The loader resolves cloned functions before the sanitizers have started.
FLAGS += ["-DCKSTORE_NO_CLONES", f"-I{NATIVE}"]
ROUNDS = 1000


def compiler() -> str:
    """Return a C++ compiler that can link the sanitizers, or skip and say why."""
    found = next((path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if (path := which(name))), None)
    if found is None:
        pytest.skip("no C++ compiler is installed")
    return found


def which(name: str | None) -> str | None:
    return shutil.which(name) if name else None


def run(command: list[str], seconds: int, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=seconds
    )


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_loops_stay_within_their_buffers_and_the_language(tmp_path: Path, record_property) -> None:
    cxx, probe, program = compiler(), tmp_path / "probe.cpp", tmp_path / "sanitized"
    probe.write_text("int main() { return 0; }\n")
    linked = run([cxx, *FLAGS, str(probe), "-o", str(tmp_path / "probe")], 300)
    if linked.returncode != 0:
        pytest.skip(f"{cxx} cannot link the sanitizers: {linked.stderr.strip().splitlines()[-1:]}")
    sources = [str(path) for path in sorted(NATIVE.glob("*.cpp")) if path.name != "module.cpp"]
    built = run([cxx, *FLAGS, str(ROOT / "tests" / "support" / "sanitized.cpp"), *sources, "-o", str(program)], 900)
    assert built.returncode == 0, built.stderr
    # Leaks cannot be looked for under a tracer, and the loops allocate nothing.
    done = run([str(program), str(ROUNDS), "1"], 900, ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1")
    assert done.returncode == 0, done.stdout + done.stderr
    record_property("covered", f"sanitizers: {done.stdout.strip()}")
