"""Build the native loops with sanitizers; programs and objects are cached across runs, since compiling takes minutes.

Invariants:
- The name of a cached file contains a hash of everything that decides its content: compiler, flags, sources, headers.
- A cached file is complete: it is written under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "native"
PROGRAM = ROOT / "tests" / "support" / "sanitized.cpp"
FLAGS = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# The loader resolves cloned functions before the sanitizers have started.
FLAGS += ["-DCKSTORE_NO_CLONES", f"-I{NATIVE}"]

COMPILERS_AT_ONCE = 2
BUILDS_KEPT = 3
"""The cache holds the objects and programs of so many states of the sources."""

SECONDS_MAX = 900


class BuildError(Exception):
    """The compiler or the linker failed; the text is what it printed."""


@dataclass(frozen=True, slots=True)
class Build:
    """A program that was built.

    Attributes:
        program: Its path in the cache.
        compiled: Sources that were compiled for it now; empty when everything was cached.
    """

    program: Path
    compiled: tuple[str, ...]


def find_compiler() -> str | None:
    """Return a C++ compiler, or None."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next(filter(None, map(shutil.which, names)), None)


def cache_folder() -> Path:
    """Return the folder in which test programs are kept across runs."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ckstore-tests"


def build(cxx: str, cache: Path, sources: Sequence[Path] | None = None) -> Build:
    """Return the program for the sources as they are now; compile only what the cache lacks.

    Args:
        cxx: The compiler.
        cache: The folder of cached files; it is made if it is missing.
        sources: What to link; by default all loops and the program that calls them.

    Raises:
        BuildError: A source cannot be compiled or linked.
    """
    if sources is None:
        sources = [PROGRAM, *(path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "module.cpp")]
    cache.mkdir(parents=True, exist_ok=True)
    shared = _hash_of(_output_of([cxx, "--version"]), *FLAGS, *(path.read_bytes() for path in _headers()))
    objects = [cache / f"sanitized-{path.stem}-{_hash_of(shared, path.read_bytes())}.o" for path in sources]
    program = cache / f"sanitized-{_hash_of(*(path.name for path in objects))}"
    missing = []
    if not program.exists():
        missing = [pair for pair in zip(sources, objects, strict=True) if not pair[1].exists()]
        with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
            list(pool.map(lambda pair: _make(pair[1], [cxx, *FLAGS, "-c", str(pair[0])]), missing))
        _make(program, [cxx, *FLAGS, *map(str, objects)])
    for path in (program, *objects):
        if path.exists():
            os.utime(path)
    _remove_old(cache, len(sources))
    return Build(program, tuple(path.name for path, _ in missing))


def _headers() -> list[Path]:
    return sorted(NATIVE.glob("*.hpp"))


def _hash_of(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:24]


def _output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _make(target: Path, command: list[str]) -> None:
    """Run a compiler that writes one file, and give the file its name when it is complete."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        made = Path(folder) / "made"
        done = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
        if done.returncode:
            raise BuildError(done.stderr)
        made.rename(target)


def _remove_old(cache: Path, source_count: int) -> None:
    """Keep the files that were used last."""
    for pattern, count in (("sanitized-*.o", source_count * BUILDS_KEPT), ("sanitized-*[0-9a-f]", BUILDS_KEPT)):
        found = sorted(cache.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
        for path in found[: max(0, len(found) - count)]:
            path.unlink(missing_ok=True)
