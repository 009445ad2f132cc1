"""The verbs for damaged stores: put aside what cannot be read, and mend what can be mended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckstore.errors import UsageError
from ckstore.io.backend import Backend
from ckstore.io.url import backend_for
from ckstore.store.store_config import read_store_record
from ckstore.verbs.background import Background

if TYPE_CHECKING:
    from ckstore.ops.pack_copies import QuarantineReport
    from ckstore.ops.repair import RepairReport


class Repairing(Background):
    """A run of a store, and what can be done where something of the store is damaged."""

    def quarantine(self, *, dry_run: bool = True) -> QuarantineReport:
        """Move manifests that cannot be read, of all runs, and torn packs that nothing names, to ``quarantine/``.

        An unreadable manifest may name any pack, so that nothing is collected until it was put aside. Nothing is
        removed: bring a file back by moving it to where it was. ``repair`` does this too, and more.

        Args:
            dry_run: Only say what would be moved.
        """
        from ckstore.ops.pack_copies import quarantine_damaged

        with self._lock:
            self._check_open()
            self._settle()
            return quarantine_damaged(self._repository, dry_run=dry_run)

    def repair(
        self,
        *,
        dry_run: bool = True,
        sources: Sequence[str | os.PathLike[str] | Backend] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RepairReport:
        """Mend what is damaged in the store, all runs: from other frames and packs, and from copies elsewhere.

        Every frame that a checkpoint names is read. What is damaged or missing is looked for in all packs, in the
        trash, in quarantine and in ``sources``. A checkpoint of which something is found nowhere becomes partial:
        ``restore(only=...)`` gives the rest of it, a full restore raises and names what is lost, and a later repair
        makes it whole when the same bytes were committed again. Damaged files go to ``quarantine/``; nothing is
        removed.

        Args:
            dry_run: Only say what would be done.
            sources: Copies of this store: folders, URLs or backends.
            on_progress: Called with packs looked at and packs in all.

        Raises:
            ConflictError: Another live process writes a run that has to be mended.
            CapacityError: The disk is full; each checkpoint is as it was, or mended.
            UsageError: A source is another store.
        """
        from ckstore.codec.frame_decoder import FrameDecoder
        from ckstore.ops.repair import repair

        limits = self._repository.limits
        with self._lock, opened_copies(sources, self._repository.store_id) as backends:
            self._check_open()
            self._settle()
            if not dry_run:
                self._reclaim_lease()
                # What the next commit is coded against is looked up again.
                self._bases = None
            return repair(
                self._repository,
                lambda: FrameDecoder(limits.chunk_nbytes_max).check_frame,
                dry_run=dry_run,
                sources=backends,
                on_progress=on_progress,
            )


@contextmanager
def opened_copies(
    sources: Sequence[str | os.PathLike[str] | Backend], store_id: bytes | None
) -> Iterator[list[Backend]]:
    """Open copies of this store, and close them; None: of whichever store."""
    backends: list[Backend] = []
    opened: list[Backend] = []
    try:
        for source in sources:
            backend = backend_for(source, allow_shared_folder=True)
            backends.append(backend)
            if backend is not source:
                opened.append(backend)
            if store_id is not None and bytes.fromhex(read_store_record(backend).store_id) != store_id:
                raise UsageError("this is another store, and no copy of this one", where=backend.root)
        yield backends
    finally:
        for backend in opened:
            backend.close()
