"""The store a user holds: each verb is handed to its story."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

from ckstore import history
from ckstore.arguments import check_metrics, check_step
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import EngineName, Limits, Policy
from ckstore.contents import Contents, contents_of
from ckstore.errors import CkstoreError, NotFoundError, UsageError
from ckstore.format.header import ManifestHeader
from ckstore.info import Info
from ckstore.io.address import backend_for
from ckstore.io.backend import Backend
from ckstore.store.parts import Parts, create_store, read_store_record
from ckstore.store.references import (
    Reference,
    check_tag_name,
    header_or_none,
    headers_newest_first,
    load_whole,
    newest_whole,
    resolve,
)
from ckstore.tensor import LeafAdapter

# The stories and all they need are imported by the verbs that tell them: listing and tagging start at once.
if TYPE_CHECKING:
    from ckstore.receipt import Receipt
    from ckstore.stale import Fingerprint
    from ckstore.store.verify import Report

_log = logging.getLogger("ckstore")


def open(
    path: str | os.PathLike[str] | Backend,
    *,
    run: str = "main",
    create: bool = True,
    policy: Policy | None = None,
    engine: EngineName = "auto",
    allow_shared_folder: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Store:
    """Open a store, and make it on first use.

    Args:
        path: A folder, a ``file://`` URL, or a backend.
        run: The run to work in; letters, digits, ``.``, ``_`` and ``-``.
        create: Make the store if there is none; False: never.
        policy: How commits are stored unless a commit says otherwise.
        engine: What moves packs: ``"auto"`` takes io_uring where it works, else pwrite.
        allow_shared_folder: Accept a folder that others may write.
        clock: Where time comes from.

    Raises:
        NotFoundError: There is no store and ``create`` is False.
        UsageError: The folder holds something else, or others may write it.
        UnsupportedError: A newer ckstore made it, or the file system lacks what durability needs.
    """
    backend = backend_for(path, engine=engine, allow_shared_folder=allow_shared_folder)
    try:
        record = read_store_record(backend)
    except NotFoundError:
        if not create:
            raise
        record = create_store(backend, clock, Limits())
    return Store(Parts(backend, record, run, clock=clock), policy or Policy())


class Store:
    """A run of a store, to commit to and restore from; made by ``ckstore.open``.

    A handle may be used from several threads, one verb at a time. It is not for a forked child: open the
    store again there.
    """

    def __init__(self, parts: Parts, policy: Policy) -> None:
        self._parts = parts
        self._policy = policy
        self._lock = threading.RLock()
        self._parent: int | None = None
        self._fingerprint: Fingerprint | None = None
        self._restored: Info | None = None
        self._is_closed = False
        # Runs when the handle is collected and at exit, so that the lease does not outlive its holder.
        self._finalizer = weakref.finalize(self, parts.close)

    def __repr__(self) -> str:
        return f"ckstore.Store({self._parts.backend.root!r}, run={self._parts.run!r})"

    @property
    def run(self) -> str:
        """The run this handle works in."""
        return self._parts.run

    @property
    def restored(self) -> Info | None:
        """What the last restore of this handle returned; None before the first."""
        return self._restored

    # Writing

    def commit(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Receipt:
        """Store a state; when this returns, it survives a SIGKILL and a power cut.

        Args:
            state: Nested dicts, lists and tuples whose leaves are tensors, arrays and plain values, or
                objects with ``state_dict``. It must not be changed before this returns.
            step: The trainer's step, not negative. An earlier entry of the step stays in the history.
            metrics: Numbers to find this checkpoint by, as in ``best:loss``.
            tags: Names for it.
            policy: How to store it; the store's policy otherwise.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            ConflictError: Another live process writes this run.
            CapacityError: The disk is full; earlier checkpoints are intact.
            BackendError: The medium failed.
        """
        from ckstore.capture import capture
        from ckstore.commit import Request, commit
        from ckstore.receipt import Stopwatch

        number = check_step(step)
        checked_metrics = check_metrics(metrics)
        for name in tags:
            check_tag_name(name)
        with self._lock:
            self._check_open()
            watch = Stopwatch(self._parts.clock)
            with watch("stage"):
                captured = capture(state, _adapters())
            request = Request(
                captured=captured,
                step=number,
                policy=policy or self._policy,
                parent=self._parent,
                metrics=checked_metrics,
                fingerprint=self._fingerprint,
            )
            committed = commit(self._parts, request, watch)
            receipt = committed.receipt
            self._parent, self._fingerprint = receipt.seq, committed.fingerprint
            untagged = [warning for name in tags if (warning := self._tag_or_warning(name, receipt.seq))]
            receipt = dataclasses.replace(receipt, warnings=(*receipt.warnings, *untagged))
        for warning in receipt.warnings:
            _log.warning("step %d: %s", receipt.step, warning)
        return receipt

    def _tag_or_warning(self, name: str, seq: int) -> str:
        try:
            history.tag(self._parts, name, f"seq:{seq}")
        except CkstoreError as error:
            # The checkpoint is durable: an error here would make the caller commit it again.
            return f"the checkpoint is durable, but tag {name!r} was not set: {error}"
        return ""

    def tag(self, ref: Reference, name: str) -> None:
        """Give a checkpoint a name; a name that exists moves to it."""
        check_tag_name(name)
        with self._lock:
            self._check_open()
            self._parts.manifests.make_folders()
            history.tag(self._parts, name, ref)

    def untag(self, name: str) -> None:
        """Remove a name; NotFoundError when there is none."""
        with self._lock:
            self._check_open()
            self._parts.tags.remove(name)

    def rewind(self, ref: Reference) -> Info:
        """Publish an entry again as the newest, so that a crash before the next commit resumes from it."""
        with self._lock:
            self._check_open()
            manifest = history.rewind(self._parts, ref)
            self._parts.known.pin(manifest)
            self._parent = manifest.header.seq
            return self._info(manifest.header)

    def delete(self, ref: Reference) -> history.Deleted:
        """Drop a checkpoint: every entry of a step, or with ``"seq:N"`` one.

        Raises:
            NotFoundError: There is no such checkpoint.
            ConflictError: It carries a tag.
        """
        with self._lock:
            self._check_open()
            return history.delete(self._parts, ref)

    # Reading

    def restore(
        self,
        ref: Reference | None = None,
        *,
        into: Any = None,
        only: str | Sequence[str] | None = None,
        device: Any = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Return a state, bit for bit as it was committed, or raise.

        Args:
            ref: Which checkpoint; None: the newest that is whole.
            into: A state to fill in place: its tensors are overwritten where they are, ``load_state_dict``
                is called on objects, leaves that it lacks are made.
            only: Globs over dotted leaf paths, where ``*`` crosses dots; only their bytes are read. What
                comes back is nested dicts, lists whole.
            device: Where tensors go; the CPU otherwise.
            on_progress: Called now and then, from any thread, with bytes restored and bytes in all.

        Raises:
            NotFoundError: There is no such checkpoint, or nothing matches ``only``.
            CorruptError: Stored bytes are damaged; names pack, offset and tensor. ``into`` may then be
                partly overwritten.
            UsageError: ``into`` has other leaves, shapes or dtypes; nothing was written.
        """
        from ckstore.placement import libraries_needed, prepare_restore
        from ckstore.restore import restore

        with self._lock:
            self._check_open()
            if ref is None:
                manifest, passed_over = newest_whole(self._parts)
                for sentence in passed_over:
                    _log.warning("%s", sentence)
            else:
                manifest, passed_over = load_whole(self._parts, resolve(self._parts, ref)), []
            needs_torch = "torch" in libraries_needed(manifest.tree, manifest.tensors)
            placement = prepare_restore(
                manifest.tree,
                manifest.tensors,
                manifest.storages,
                into=into,
                only=only,
                device=device,
                adapters=_adapters(needs_torch=needs_torch),
            )
            state = restore(self._parts, manifest, placement, self._policy, on_progress=on_progress)
            for sentence in placement.warnings:
                _log.warning("%s", sentence)
            self._restored = self._info(manifest.header, warnings=[*passed_over, *placement.warnings])
            if only is None:
                self._parts.known.pin(manifest)
                self._parent = manifest.header.seq
                self._fingerprint = None
            return state

    def latest(self) -> Info | None:
        """Return the newest checkpoint that is whole, or None in an empty run."""
        with self._lock:
            self._check_open()
            try:
                manifest, passed_over = newest_whole(self._parts)
            except NotFoundError:
                return None
            return self._info(manifest.header, warnings=passed_over)

    def info(self, ref: Reference) -> Info:
        """Return what is known of a checkpoint; reads its header only."""
        with self._lock:
            self._check_open()
            name = resolve(self._parts, ref)
            header = header_or_none(self._parts.manifests, name)
            if header is None:
                raise NotFoundError(f"seq {name.seq} was dropped meanwhile", where=self._parts.backend.root)
            return self._info(header)

    def log(self) -> list[Info]:
        """Return every entry of the run, newest first.

        Raises:
            CorruptError: A header is damaged; `ckstore ls` shows the others.
        """
        with self._lock:
            self._check_open()
            by_seq: dict[int, list[str]] = {}
            for name, record in self._parts.tags.all().items():
                by_seq.setdefault(record.seq, []).append(name)
            headers = headers_newest_first(self._parts.manifests)
            return [Info.of(header, tags=sorted(by_seq.get(header.seq, ()))) for header in headers]

    def steps(self) -> list[int]:
        """Return the steps that can be restored, each once, ascending."""
        with self._lock:
            self._check_open()
            return sorted({name.step for name in self._parts.manifests.listing().names})

    def tags(self) -> dict[str, int]:
        """Return each tag with the seq it points to."""
        with self._lock:
            self._check_open()
            return {name: record.seq for name, record in sorted(self._parts.tags.all().items())}

    def runs(self) -> list[str]:
        """Return the names of all runs of the store."""
        with self._lock:
            self._check_open()
            return self._parts.runs()

    def verify(
        self,
        level: str = "read",
        *,
        ref: Reference | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """Read everything, believe nothing, and report; nothing is changed.

        Args:
            level: ``"quick"``: manifests and directories; ``"read"``: every stored byte; ``"decode"``:
                everything a restore would find.
            ref: One checkpoint; None: the whole store, all runs.
            on_progress: Called now and then with bytes read and bytes in all.
        """
        from ckstore.pipeline import ChunkWorker, worker_nbytes
        from ckstore.store.verify import verify

        with self._lock:
            self._check_open()
            names = None if ref is None else [(self.run, resolve(self._parts, ref))]
            return verify(
                self._parts,
                level,
                names,
                make_check=lambda: ChunkWorker(self._parts.limits.chunk_nbytes_max).check_frame,
                check_nbytes=worker_nbytes(self._parts.limits.chunk_nbytes_max),
                policy=self._policy,
                on_progress=on_progress,
            )

    # Ending

    def close(self) -> None:
        """Give up the writer lease and let go of descriptors; repeated calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._finalizer()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, header: ManifestHeader, *, warnings: Sequence[str] = ()) -> Info:
        return Info.of(header, tags=self._parts.tags.names_of(header.seq), warnings=warnings)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the store is closed", where=self._parts.backend.root, todo="open it again")

    def contents(self, ref: Reference) -> Contents:
        """Return what a checkpoint holds, tensor by tensor; reads its manifest only."""
        with self._lock:
            self._check_open()
            name = resolve(self._parts, ref)
            try:
                manifest = self._parts.manifests.load(name)
            except FileNotFoundError:
                raise NotFoundError(
                    f"seq {name.seq} was dropped or replaced while it was read",
                    where=self._parts.backend.root,
                    todo="look again",
                ) from None
            return contents_of(manifest, self._info(manifest.header))


def _adapters(*, needs_torch: bool = False) -> list[LeafAdapter]:
    """Return the tensor libraries to ask; torch only where it is loaded already, or needed and installed."""
    if "torch" not in sys.modules and not (needs_torch and importlib.util.find_spec("torch")):
        return []
    from ckstore.adapters.torch_state import TorchAdapter

    return [TorchAdapter()]
