"""Protects memory safety: native loops run with the address and undefined-behavior sanitizers on hostile payloads.

The program is compiled once for each state of the sources and cached; see support/sanitized_build.py.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.sanitized_build import BUILDS_KEPT, BuildError, build, cache_folder, find_compiler

ROUNDS = 1000
FAULTS = {
    "heap-use-after-free": "int main(int n, char **) { volatile int *p = new int[4]; delete[] p; return p[n] & 0; }\n",
    "shift exponent": "int main(int n, char **) { return (n << (n + 40)) & 0; }\n",
}
"""What the sanitizers report, and a program that triggers it."""


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # LeakSanitizer does not work under a tracer, and the loops allocate nothing.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [str(program), *arguments],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


@pytest.fixture(scope="module")
def cxx(tmp_path_factory) -> str:
    """A C++ compiler that can link the sanitizers."""
    found = find_compiler()
    if found is None:
        pytest.skip("no C++ compiler is installed")
    source = tmp_path_factory.mktemp("probe") / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    try:
        build(found, source.parent, [source])
    except BuildError as error:
        pytest.skip(f"{found} cannot link the sanitizers: {str(error).strip().splitlines()[-1:]}")
    return found


# Compiling takes most of a minute without a cache, so not every commit does it.
@pytest.mark.deep(parts=8)
@pytest.mark.timeout(2400)
def test_native_loops_pass_sanitizers(cxx, sample, note) -> None:
    rounds = sample.count(ROUNDS, parts=5)
    done = run(build(cxx, cache_folder()).program, str(rounds), str(sample.seed(1)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{rounds} rounds, "), done.stdout
    note(f"sanitizers: {done.stdout.strip()}")


@pytest.mark.parametrize("report", FAULTS)
def test_sanitizers_report_faulty_program(report, cxx, tmp_path) -> None:
    """The negative control: with these flags, each of the two sanitizers finds an error."""
    source = tmp_path / "faulty.cpp"
    source.write_text(FAULTS[report])
    done = run(build(cxx, tmp_path / "cache", [source]).program)
    assert done.returncode != 0
    assert report in done.stderr


def test_unchanged_sources_are_not_recompiled(cxx, tmp_path) -> None:
    sources = [tmp_path / "main.cpp", tmp_path / "other.cpp"]
    sources[0].write_text("int other(); int main() { return other(); }\n")
    programs, cache = set(), tmp_path / "cache"
    for value in range(BUILDS_KEPT + 1):
        sources[1].write_text(f"int other() {{ return {value}; }}\n")
        made = build(cxx, cache, sources)
        assert made.compiled == (("main.cpp", "other.cpp") if value == 0 else ("other.cpp",))
        assert run(made.program).returncode == value
        assert build(cxx, cache, sources) == type(made)(made.program, ())
        programs.add(made.program)
    assert sum(program.exists() for program in programs) == BUILDS_KEPT
    assert all(path.name.startswith("sanitized-") for path in cache.iterdir())
