"""``PointerStore``: a store whose checkpoints a framework knows by the paths of pointers.

Invariants:
- A pointer that names a seq is written only after that checkpoint is durable. While the commit is in flight, the
  pointer names its step, and says that it is in flight.
- A checkpoint is deleted only when no commit is in flight: everything that was saved after it is durable. If a commit
  fails, nothing that waited for it is deleted.
- ``remove`` deletes a checkpoint before its pointer. A crash in between leaves a pointer that is refused.
- A pointer that a save replaces is resolved before the commit begins: later its step could name the new checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckstore.errors import CkstoreError, ConflictError, NotFoundError
from ckstore.format.records import PointerRecord, with_changes
from ckstore.integrations.pointers import (
    address_from,
    address_in,
    entry_of,
    is_pointer,
    pointer_file,
    read_pointer,
    require_local,
    sync_folder,
    write_pointer,
)
from ckstore.opening import open as open_store
from ckstore.ops.gc.policy import Retention

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.background.pending import Pending
    from ckstore.config import Policy
    from ckstore.results import Info, Receipt

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A commit that is not known to be durable, and its pointer."""

    pending: Pending
    file: Path
    record: PointerRecord
    replaces: PointerRecord | None


class PointerStore:
    """One run of a store, and the pointers to its checkpoints.

    Not thread-safe. The store is opened when it is first needed.

    Args:
        address: Folder or URL of the store; created on first save.
        run: The run of the store.
        policy: How checkpoints are stored; None: exactly.
        background: Commit in the background. A store in a bucket always commits in the foreground.
        made_by: The framework and its version, for the pointers.
        hint: A sentence for people who open a pointer.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        *,
        run: str = "main",
        policy: Policy | None = None,
        background: bool = True,
        made_by: str,
        hint: str = "",
    ) -> None:
        given = os.fspath(address)
        self.address = given if "://" in given else str(Path(given).absolute())
        self.run = run
        self.background = background and ("://" not in given or given.startswith("file://"))
        self._policy = policy
        self._made_by = made_by
        self._hint = hint
        self._opened: Store | None = None
        self._in_flight: list[_InFlight] = []
        self._announced: dict[Path, PointerRecord | None] = {}
        self._to_remove: list[Path] = []
        self._replaced: list[tuple[Path, PointerRecord]] = []
        self._last_seq: int | None = None

    @classmethod
    def at(
        cls,
        address: str | os.PathLike[str],
        *,
        run: str = "main",
        policy: Policy | None = None,
        background: bool = True,
        made_by: str,
    ) -> PointerStore:
        """Return the object for a run of a store: the one that this process has, or a new one.

        A process that makes a trainer a second time, as in a notebook, would otherwise compete with itself for the run.
        The other arguments then apply from now on.
        """
        made = cls(address, run=run, policy=policy, background=background, made_by=made_by)
        key = (os.getpid(), made.address, run)
        known = _KNOWN.setdefault(key, made)
        known.background, known._policy, known._made_by = made.background, policy, made_by
        return known

    def __repr__(self) -> str:
        return f"PointerStore({self.address!r}, run={self.run!r})"

    @property
    def store(self) -> Store:
        """The store. Created if it does not exist."""
        if self._opened is None:
            # A store in a bucket is collected by `ckstore gc`, because not every process may do it.
            self._opened = open_store(
                self.address, run=self.run, retention=None if "://" in self.address else _KEEP_ALL
            )
            newest = self._opened.latest()
            self._last_seq = None if newest is None else newest.seq
        return self._opened

    def exists(self) -> bool:
        """Say whether there is a store. Creates none."""
        if self._opened is not None:
            return True
        try:
            open_store(self.address, run=self.run, create=False).close()
        except NotFoundError:
            return False
        return True

    def newest(self) -> Info | None:
        """Return the newest durable checkpoint; None if there is none. Creates no store."""
        return self.store.latest() if self.exists() else None

    def announce(self, step: int, path: str | os.PathLike[str]) -> None:
        """Write the pointer of a ``save`` to the same path that follows. Until then it names a checkpoint in flight.

        For a checkpoint that is a folder: whatever a crash leaves in it is recognized by its pointer.

        Raises:
            UsageError: The path is a URL.
            CkstoreError: An earlier commit failed.
        """
        file = require_local(path)
        self.poll()
        self._announced[file] = self._replaced_by_save(file)
        write_pointer(file, self._record(file, step))

    def point(self, path: str | os.PathLike[str], info: Info) -> None:
        """Write a pointer to a checkpoint of this run that is durable already.

        Raises:
            UsageError: The path is a URL.
        """
        file = require_local(path)
        record = self._record(file, info.step)
        write_pointer(file, with_changes(record, seq=info.seq, checkpoint_id=info.checkpoint_id))

    def prewarm(self, state: Any) -> None:
        """Start the saver and allocate memory for a state, as ``Store.prewarm``. In the foreground it does nothing.

        Raises:
            CapacityError: There is not enough memory for a copy of the state.
        """
        if self.background:
            self.store.prewarm(state, policy=self._policy)

    def save(
        self,
        state: Any,
        step: int,
        path: str | os.PathLike[str],
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
        wait: bool = False,
    ) -> None:
        """Commit a state and write the pointer. A checkpoint that the pointer named before is deleted later.

        With ``background`` the checkpoint is durable later; ``poll`` and ``wait`` raise the errors of the commit. A
        file at the path that is not a pointer is replaced only after the checkpoint is durable.

        Args:
            state: As for ``Store.commit``.
            step: The trainer's step.
            path: The file of the pointer. Its folder must exist.
            metrics: Numbers to find the checkpoint by.
            tags: Names for the checkpoint.
            policy: How to store it; None: the policy of the store.
            wait: Write the pointer only after the checkpoint is durable, so that there is none if the process dies.

        Raises:
            UsageError: The path is a URL.
            CkstoreError: As ``Store.commit`` and ``Store.commit_async``; or an earlier commit failed.
        """
        file = require_local(path)
        self.poll()
        is_foreign = file.is_file() and not file.is_symlink() and not is_pointer(file)
        # A save that was announced has changed files around the pointer: they do not belong to the old checkpoint.
        was_announced = file in self._announced
        replaces = self._announced.pop(file) if was_announced else self._replaced_by_save(file)
        store = self.store
        if self.background:
            pending = store.commit_async(state, step, metrics=metrics, tags=tags, policy=policy or self._policy)
            record = self._record(file, step, None if was_announced else replaces)
            if wait or is_foreign:
                pending.result()
            self._in_flight.append(_InFlight(pending, file, record, replaces))
        else:
            receipt = store.commit(state, step, metrics=metrics, tags=tags, policy=policy or self._policy)
            record = self._with_entry(self._record(file, step), receipt)
        if not (was_announced and is_pointer(file) and read_pointer(file) == record):
            write_pointer(file, record)
        if not self.background and replaces is not None:
            self._delete(replaces, file)

    def load(self, path: str | os.PathLike[str], **how: Any) -> Any:
        """Restore the checkpoint that a pointer names.

        Args:
            path: The pointer, or a folder with ``ckstore.json``.
            **how: ``into``, ``only``, ``device``, ``exact``, ``on_progress``, as for ``Store.restore``.

        Raises:
            NotFoundError: There is no pointer, or its checkpoint is gone.
            CkstoreError: As ``Store.restore``.
        """
        record = read_pointer(path)
        if any(each.file.resolve() == pointer_file(path).resolve() for each in self._in_flight):
            self.wait()
            record = read_pointer(path)
        if self._is_own(record, path):
            info = entry_of(self.store, record, where=path)
            return self.store.restore(f"seq:{info.seq}", **how)
        with open_store(address_in(record, path), run=record.run, create=False) as other:
            info = entry_of(other, record, where=path)
            return other.restore(f"seq:{info.seq}", **how)

    def entry(self, path: str | os.PathLike[str]) -> Info:
        """Return the checkpoint that a pointer names.

        Raises:
            NotFoundError: There is no pointer, or its checkpoint is gone or never became durable.
            ConflictError: The pointer belongs to another store or run.
        """
        record = read_pointer(path)
        if record.run != self.run:
            raise ConflictError(f"the pointer belongs to run {record.run}; this is run {self.run}", where=path)
        return entry_of(self.store, record, where=path)

    def owns(self, record: PointerRecord, path: str | os.PathLike[str]) -> bool:
        """Say whether a pointer belongs to this run of this store."""
        return self._is_own(record, path)

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint that a pointer names, and the pointer, as soon as no commit is in flight.

        The checkpoint goes to the trash of the store. One with a tag is kept. A missing pointer is ignored.
        """
        self._to_remove.append(require_local(path))
        self.poll()

    def poll(self) -> None:
        """Settle the pointers of commits that have ended, and delete what was to be deleted. Does not wait.

        Raises:
            CkstoreError: A commit failed. Its pointer is removed; checkpoints that waited for it are kept.
        """
        while (ended := next((each for each in self._in_flight if each.pending.is_done), None)) is not None:
            self._in_flight.remove(ended)
            self._settle(ended)
        if not self._in_flight:
            replaced, self._replaced = self._replaced, []
            self.delete_entries(replaced)
            to_remove, self._to_remove = self._to_remove, []
            for path in to_remove:
                self._remove_now(path)

    def wait(self) -> None:
        """Wait until everything saved is durable, then do as ``poll``.

        Raises:
            CkstoreError: A commit failed.
        """
        for each in self._in_flight:
            with contextlib.suppress(CkstoreError):
                each.pending.result()
        self.poll()

    @property
    def last_step(self) -> int | None:
        """The largest step of the commits in flight, or else that of the newest checkpoint; None: there is none."""
        in_flight = [each.record.step for each in self._in_flight]
        if in_flight:
            return max(in_flight)
        newest = self.newest()
        return None if newest is None else newest.step

    @property
    def is_settled(self) -> bool:
        """Whether everything saved is durable and nothing waits to be deleted."""
        return not self._in_flight and not self._to_remove and not self._replaced

    def delete_entries(self, records: Sequence[tuple[Path, PointerRecord]]) -> None:
        """Delete the checkpoints of pointers that the framework has removed itself. Call it when settled."""
        for path, record in records:
            self._delete(record, path)

    def close(self) -> None:
        """Wait until everything is durable, and close the store. It is opened again when needed.

        Raises:
            CkstoreError: A commit failed.
        """
        try:
            self.wait()
        finally:
            store, self._opened = self._opened, None
            if store is not None:
                store.close()

    def _record(self, file: Path, step: int, replaces: PointerRecord | None = None) -> PointerRecord:
        about = (
            "The checkpoint is in a ckstore store. `ckstore show` and `ckstore restore` take the path of this file; "
            f"`ckstore export --hf` writes weights that other programs load. {self._hint}"
        ).rstrip()
        previous = None
        if replaces is not None and self._is_own(replaces, file):
            # A checkpoint that is itself in flight may never become durable.
            is_durable = replaces.seq is not None
            previous = (
                (replaces.seq, replaces.checkpoint_id) if is_durable else (replaces.previous_seq, replaces.previous_id)
            )
        return PointerRecord(
            about=about,
            made_by=self._made_by,
            store=address_from(file.parent, self.address),
            store_id=self.store.store_id,
            run=self.run,
            step=step,
            after_seq=self._last_seq,
            ahead=sum(each.record.step == step for each in self._in_flight),
            seq=None,
            checkpoint_id=None,
            previous_seq=None if previous is None else previous[0],
            previous_id=None if previous is None else previous[1],
        )

    def _replaced_by_save(self, file: Path) -> PointerRecord | None:
        """Return the pointer that a save to this file replaces; None: there is none, or it names no checkpoint."""
        # It would be deleted with what is saved now.
        self._to_remove = [path for path in self._to_remove if path != file]
        if not file.is_file() or file.is_symlink() or not is_pointer(file):
            return None
        record = read_pointer(file)
        if record.seq is not None or any(each.file == file for each in self._in_flight):
            return record
        if not self._is_own(record, file):
            return None
        try:
            info = entry_of(self.store, record, where=file)
        except NotFoundError:
            return None
        if record.previous_seq not in (None, info.seq):
            # Its process has died after the commit, and before it deleted what that replaced.
            previous = with_changes(record, seq=record.previous_seq, checkpoint_id=record.previous_id)
            self._replaced.append((file, previous))
        return with_changes(record, seq=info.seq, checkpoint_id=info.checkpoint_id)

    def _with_entry(self, record: PointerRecord, receipt: Receipt) -> PointerRecord:
        self._last_seq = receipt.seq
        return with_changes(
            record, seq=receipt.seq, checkpoint_id=receipt.checkpoint_id, previous_seq=None, previous_id=None
        )

    def _settle(self, ended: _InFlight) -> None:
        try:
            receipt = ended.pending.result()
        except CkstoreError:
            kept, self._to_remove = self._to_remove, []
            for path in kept:
                _log.warning("%s is kept: a checkpoint saved after it has failed", path)
            if not self._note_in_next_save(ended, ended.replaces) and self._is_current(ended):
                if ended.replaces is None or ended.record.previous_seq is None:
                    # Training resumes from the newest checkpoint; a pointer to nothing would mislead.
                    ended.file.unlink()
                else:
                    write_pointer(ended.file, ended.replaces)
            if not ended.pending.is_skipped:
                raise
            _log.warning("step %d has no checkpoint: an earlier commit was still being written", ended.pending.step)
            return
        record = self._with_entry(ended.record, receipt)
        if not self._note_in_next_save(ended, record) and self._is_current(ended):
            write_pointer(ended.file, record)
        if ended.replaces is not None:
            self._replaced.append((ended.file, ended.replaces))

    def _note_in_next_save(self, ended: _InFlight, record: PointerRecord | None) -> bool:
        """Note in the next save to the same path which checkpoint it replaces; say whether there is one."""
        for position, later in enumerate(self._in_flight):
            if later.file == ended.file:
                self._in_flight[position] = _InFlight(later.pending, later.file, later.record, record)
                return True
        if ended.file in self._announced:
            self._announced[ended.file] = record
            return True
        return False

    def _is_current(self, ended: _InFlight) -> bool:
        """Say whether the pointer is still the one that was written for this commit."""
        try:
            return read_pointer(ended.file) == ended.record
        except CkstoreError:
            return False

    def _is_own(self, record: PointerRecord, path: str | os.PathLike[str]) -> bool:
        return self.run == record.run and self.exists() and self.store.store_id == record.store_id

    def _remove_now(self, path: Path) -> None:
        if not path.is_symlink():
            try:
                self._delete(read_pointer(path), path)
            except NotFoundError:
                return
        file = pointer_file(path)
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
            sync_folder(file.parent)

    def _delete(self, record: PointerRecord, path: Path) -> None:
        """Delete the checkpoint of a pointer, unless it is tagged, gone, or in another store."""
        if not self._is_own(record, path):
            _log.warning("the checkpoint of %s is kept: it is not in run %s of %s", path, self.run, self.address)
            return
        try:
            info = entry_of(self.store, record, where=path)
            self.store.delete(f"seq:{info.seq}")
        except NotFoundError:
            return
        except ConflictError as error:
            _log.info("the checkpoint of %s is kept: %s", path, error)


_KEEP_ALL = Retention(keep_last=1_000_000_000)
"""Frameworks decide what is deleted. The collections that go with these rules free the space, when the trash is old."""

_KNOWN: weakref.WeakValueDictionary[tuple[int, str, str], PointerStore] = weakref.WeakValueDictionary()
"""The object for each process, address and run."""
