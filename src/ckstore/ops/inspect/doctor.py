"""Facts about this machine and a store that help to find a problem. Nothing is changed.

The probes of the I/O engine and O_DIRECT use an unnamed temporary file.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckstore import __version__
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.codec import kernels
from ckstore.config import is_name
from ckstore.errors import BackendError, CkstoreError, NotFoundError, UnsupportedError
from ckstore.format import paths
from ckstore.format.records import LeaseRecord
from ckstore.io.backend import Ageing, Backend, Locking
from ckstore.io.local import LocalBackend
from ckstore.io.url import backend_for, mode_of_folder
from ckstore.processes import owner_is_running
from ckstore.store.lease import STALE_SECONDS
from ckstore.store.listing import packs_in
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record
from ckstore.store.tags import CLEAR_INTENTS, intents_in
from ckstore.store.trash import Trash

FREE_NBYTES_LOW = 10 << 30
AGE_DAYS_MAX = 14
"""Scratch file systems usually start to purge files after some weeks."""

Verdict = Literal["ok", "note", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        topic: What was checked.
        found: What was found.
        verdict: ``"ok"``; ``"note"``: worth knowing; ``"warning"``: worth acting on.
    """

    topic: str
    found: str
    verdict: Verdict = "ok"


def diagnose_machine() -> list[Finding]:
    """Report the versions of Python, ckstore and torch, and which loops are native. Torch is not imported."""
    slow = sorted(name for name, kind in kernels.IMPLEMENTATION.items() if kind != "native")
    loops = Finding("loops", "native")
    if slow:
        advice = "correct but slow; install a C++ compiler, then reinstall ckstore"
        found = f"numpy instead of native code for {', '.join(slow)}: {advice}"
        loops = Finding("loops", found, "warning")
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed: states with torch tensors cannot be restored here"
    return [
        Finding("ckstore", __version__),
        Finding("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("cores", str(len(os.sched_getaffinity(0)))),
        loops,
        Finding("torch", torch),
    ]


def diagnose_store(
    address: str | os.PathLike[str], *, allow_shared_folder: bool = False, clock: Clock = SYSTEM_CLOCK
) -> list[Finding]:
    """Report how a folder behaves, and the state of the store in it, if there is one.

    Raises:
        NotFoundError: The folder does not exist.
    """
    backend = backend_for(address, allow_shared_folder=allow_shared_folder)
    findings: list[Finding] = []
    if isinstance(backend, LocalBackend):
        if not mode_of_folder(Path(backend.root)):
            raise NotFoundError("there is no such folder", where=backend.root, todo="check the path")
        findings += _with_errors(_folder(backend))
    try:
        record = read_store_record(backend)
    except NotFoundError:
        return [*findings, Finding("store", "there is no store here", "note")]
    except CkstoreError as error:
        return [*findings, Finding("store", str(error), "warning")]
    findings.append(Finding("store", f"format {record.format_version}, id {record.store_id}"))
    runs = Repository(backend, record, "main", clock=clock).runs()
    findings.append(Finding("runs", ", ".join(runs) or "none yet"))
    for run in runs:
        findings += _with_errors(_run(Repository(backend, record, run, clock=clock), clock))
    findings += _with_errors(_leftovers(backend))
    if isinstance(backend, Ageing):
        findings += _with_errors(_oldest_file(backend, clock))
    backend.close()
    return findings


def _with_errors(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings. If the storage fails or access is denied, yield that as a finding."""
    try:
        yield from findings
    except CkstoreError as error:
        yield Finding("not seen", str(error), "warning")


def _folder(backend: LocalBackend) -> Iterator[Finding]:
    kind, options = _mount_of(Path(backend.root))
    is_remote = kind.startswith(("nfs", "cifs", "smb", "fuse", "lustre", "9p"))
    yield Finding("file system", f"{kind} ({options})", "note" if is_remote else "ok")
    free = backend.free_nbytes()
    if free is not None:
        yield Finding("free", f"{free / (1 << 30):.1f} GiB", "warning" if free < FREE_NBYTES_LOW else "ok")
    if not os.access(backend.root, os.W_OK | os.X_OK, effective_ids=True):
        yield Finding("writable", "no: this user can only read", "warning")
        # The other checks need to write.
        return
    if problem := _missing_locks_note(backend):
        yield Finding("locks", problem, "note")
    is_direct = backend.is_direct
    yield Finding("O_DIRECT", "yes" if is_direct else "refused: packs go through the page cache", _note(not is_direct))
    is_uring = backend.engine_name == "uring"
    yield Finding("engine", backend.engine_reason, _note(not is_uring))


def _missing_locks_note(backend: LocalBackend) -> str:
    """Return what happens without file locks, if the file system has none. Only existing files are tried."""
    for name in (paths.GC_LOCK_FILE, paths.CONFIG_LOCK_FILE):
        if backend.stat(name) is not None:
            try:
                lock = backend.try_lock(name)
            except UnsupportedError as error:
                return f"{error.what}: this is safe, but two collections at a time may repeat work"
            if lock is not None:
                lock.close()
    return ""


def _note(is_worth_knowing: bool) -> Verdict:
    return "note" if is_worth_knowing else "ok"


def _mount_of(folder: Path) -> tuple[str, str]:
    """Return type and options of the file system of a folder."""
    best = (-1, "unknown", "")
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "unknown", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, (kind, *_) = before.split(), after.split()
        if len(fields) > 5 and fields[2] == wanted:
            best = max(best, (len(fields[4]), kind, fields[5]))
    return best[1], best[2]


def _run(repository: Repository, clock: Clock) -> Iterator[Finding]:
    topic = f"run {repository.run}"
    listing = repository.manifests.listing()
    yield Finding(topic, f"checkpoints: {len(listing.names)}")
    holder = repository.lease.holder()
    if holder is not None:
        yield _lease(topic, holder, clock)
    if listing.dropped:
        yield Finding(topic, f"deleted checkpoints (drop marks): {len(listing.dropped)}")
    remaining = len({name.seq for name in listing.lower} & listing.dropped)
    if remaining:
        yield Finding(topic, f"deleted, but manifests are still in place: {remaining}; delete them again", "note")
    for intent in intents_in(repository.backend, clock, repository.run):
        todo = "" if intent.is_known else f"; {CLEAR_INTENTS}"
        yield Finding(topic, f"seq {intent.seq} cannot be tagged: there is {intent.words}{todo}", "note")


def _lease(topic: str, holder: LeaseRecord, clock: Clock) -> Finding:
    who = f"pid {holder.pid} on host {holder.host}"
    is_running = owner_is_running(holder)
    if is_running:
        return Finding(topic, f"being written by {who}, which is alive")
    if is_running is False:
        return Finding(topic, f"last written by {who}, which died; the next writer takes over", "note")
    seconds = (clock.now_ns() - holder.heartbeat_ns) / 1e9
    if seconds <= STALE_SECONDS:
        return Finding(topic, f"being written by {who}; its heartbeat is {seconds:.0f} s old")
    return Finding(topic, f"last written by {who}, whose heartbeat is {seconds:.0f} s old", "note")


def _oldest_file(backend: Backend, clock: Clock) -> Iterator[Finding]:
    """Report the age of the oldest file that a checkpoint may need, because some file systems purge old files."""
    infos = [info for _, info in packs_in(backend)]
    for run in filter(is_name, backend.list_names(paths.MANIFESTS_FOLDER)):
        folder = paths.manifests_folder(run)
        infos += [info for file in backend.list_names(folder) if (info := backend.stat(f"{folder}/{file}"))]
    if store_file := backend.stat(paths.STORE_FILE):
        infos.append(store_file)
    days = (clock.now_ns() - min((info.modified_ns for info in infos), default=clock.now_ns())) / (86400 * 1e9)
    if days >= AGE_DAYS_MAX:
        advice = "if this file system purges old files, keep a copy elsewhere with `ckstore mirror`"
        yield Finding("age", f"the oldest file was last changed {days:.0f} days ago; {advice}", "note")


def _leftovers(backend: Backend) -> Iterator[Finding]:
    kinds: Counter[str] = Counter()
    for name in backend.list_names(paths.TMP_FOLDER):
        kinds[name.rpartition(".")[2] if paths.parse_draft_file(name) else "foreign"] += 1
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        found = f"{listed}: work in progress, or left by a crash; harmless"
        yield Finding("tmp", found, "note")
    else:
        yield Finding("tmp", "empty")
    yield _trash(backend)
    if backend.list_names(paths.QUARANTINE_FOLDER):
        yield Finding("quarantine", "contains damaged files", "warning")
    if _collection_runs(backend):
        yield Finding("gc.lock", "held: a collection is running")
    made_later = (paths.CACHE_FOLDER, paths.RESERVE_FOLDER, paths.JOURNALS_FOLDER)
    ours = (*paths.TOP_FOLDERS, *paths.TOP_FILES, *made_later)
    foreign = [name for name in backend.list_names("") if name not in ours]
    if foreign:
        yield Finding("foreign files", ", ".join(foreign[:5]), "note")


def _trash(backend: Backend) -> Finding:
    """Report what is in the trash. Empty folders are normal: gc removes them after an hour."""
    folders = Trash(backend).contents()
    files = sum(len(folder.packs) + len(folder.manifests) for folder in folders)
    if not files:
        return Finding("trash", "empty")
    nbytes = sum(folder.nbytes for folder in folders)
    return Finding("trash", f"{files} files of {nbytes / 2**20:.1f} MiB; list them with `ckstore trash ls`", "note")


def _collection_runs(backend: Backend) -> bool:
    """Return whether a collection is running. The lock's file exists even when it is not held."""
    if not isinstance(backend, Locking) or backend.stat(paths.GC_LOCK_FILE) is None:
        return False
    try:
        lock = backend.try_lock(paths.GC_LOCK_FILE)
    except (BackendError, UnsupportedError):
        # On a read-only store, or without file locks, this is unknown.
        return False
    if lock is not None:
        lock.close()
    return lock is None
