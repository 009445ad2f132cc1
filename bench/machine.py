"""Facts about this machine and run, and two ways to make a read cold."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

DISTRIBUTIONS = (
    "torch",
    "numpy",
    "blake3",
    "zstandard",
    "lz4",
    "liburing",
    "msgspec",
    "safetensors",
    "torchsnapshot",
    "torch-checkpointing",
    "zipnn",
    "z4ai",
    "blosc2",
    "openzl",
    "pcodec",
)


def facts(folder: Path) -> dict[str, object]:
    """Return the facts about the machine that a reader needs, with the file system of ``folder``."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(folder),
        "cold_reads": "drop_caches" if can_drop_caches() else "posix_fadvise(DONTNEED)",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of every library that affects the numbers."""
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    return {"python": platform.python_version(), **{name: installed.get(name, "absent") for name in DISTRIBUTIONS}}


def commit() -> str:
    """Return the commit of this working tree, with ``+`` when it has changes, or ``unknown``."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    revision = git("rev-parse", "--short=12", "HEAD")
    if not revision:
        return "unknown"
    return revision + ("+" if git("status", "--porcelain") else "")


def now() -> str:
    """Return the time in UTC, in the format of result file names."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def busy_cores(seconds: float = 1.0) -> float:
    """Return how many cores other processes use while this process sleeps; 0.0 if the kernel does not report it."""

    def busy_ticks() -> int:
        user, nice, system, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        return int(user) + int(nice) + int(system)

    try:
        before = busy_ticks()
        time.sleep(seconds)
        return (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
    except OSError:
        return 0.0


def can_drop_caches() -> bool:
    """Return whether the kernel's caches can be dropped, which needs root."""
    return os.access("/proc/sys/vm/drop_caches", os.W_OK) and os.geteuid() == 0


def make_cold(folder: Path) -> None:
    """Make the next read of anything in ``folder`` come from the device.

    Without root only the pages of these files are dropped; their inodes and folders stay in memory.
    """
    os.sync()
    if can_drop_caches():
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file and folder below ``folder``, and its own name, durable."""
    paths = [folder.parent, folder]
    for root, folders, files in os.walk(folder):
        paths += [Path(root) / name for name in folders + files]
    for path in reversed(paths):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder, and wait until the device has processed that: the next measurement must not be affected."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def tree_nbytes(folder: Path) -> int:
    """Return the bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_space(folder: Path, nbytes: int) -> None:
    """Exit if ``folder`` has less free space than this."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        sys.exit(f"{folder}: {free / 1e9:.1f} GB free, {nbytes / 1e9:.1f} GB needed; choose another --dir or --size")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    best = ("", "unknown")
    try:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, place, kind = line.split()[:3]
            if str(folder.resolve()).startswith(place) and len(place) >= len(best[0]):
                best = (place, kind)
    except OSError:
        pass
    return best[1]
