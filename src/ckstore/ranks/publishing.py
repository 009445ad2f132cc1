"""Publish a merged checkpoint: the only commit point of many ranks, whichever way their parts have come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckstore.errors import BackendError, CkstoreError, ConflictError
from ckstore.format.logical import EXACT_FIDELITY
from ckstore.format.paths import ManifestName
from ckstore.format.records import LogicalRecord
from ckstore.ranks.merge import Merged
from ckstore.results import Receipt, Stopwatch
from ckstore.store.repository import Repository


class Entry(NamedTuple):
    """What the history says about a checkpoint.

    Args:
        step: The trainer's step.
        parent: The seq that training continued from.
        metrics: Numbers to find it by.
        time_ns: When the state was made; None for now.
    """

    step: int
    parent: int | None
    metrics: Mapping[str, float]
    time_ns: int | None = None


class Publisher:
    """Publishes the checkpoints of one run, one after another."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._claimed: int | None = None
        """The seq of the checkpoint that is being published."""

    def begin(self) -> None:
        """Begin another commit: nothing of it is published."""
        self._claimed = None

    def may_be_visible(self, error: BaseException) -> bool:
        """Return True unless the manifest of a failed commit is certainly not in place. Then packs must stay."""
        if self._claimed is None:
            return False
        # A server that did not answer may still make the manifest visible.
        if isinstance(error, BackendError) and error.facts.get("is_uncertain"):
            return True
        try:
            return self.is_visible()
        except (CkstoreError, OSError):
            return True

    def is_visible(self) -> bool:
        """Say whether the manifest is in place."""
        return self._claimed is not None and self._repository.manifests.is_visible(self._claimed)

    def publish(self, merged: Merged, entry: Entry, watch: Stopwatch) -> Receipt:
        """Publish a checkpoint whose packs are durable. It is durable when this returns, and invisible before.

        Raises:
            ConflictError: Another writer has the run, or packs vanished during the commit.
            CapacityError: The disk is full. Nothing was published.
            BackendError: The storage failed.
        """
        repository = self._repository
        with watch("publish"):
            repository.lease.check()
            seq = self._claimed = repository.manifests.claim(repository.seq_next())  # 8a
            repository.note_seq(seq)
            now_ns = repository.clock.now_ns()
            record = LogicalRecord(
                run=repository.run,
                seq=seq,
                step=entry.step,
                time_ns=now_ns if entry.time_ns is None else min(entry.time_ns, now_ns),
                parent=entry.parent,
                origin_id=None,
                is_archival=False,
                fidelity=EXACT_FIDELITY,
                metrics=dict(entry.metrics),
            )
            header, encoded = merged.encode(record, repository.store_id, limits=repository.limits)
            name = ManifestName(repository.run, seq, entry.step, 0)
            repository.manifests.publish_encoded(name, encoded)
        with watch("verify"):
            packs = merged.packs
            gone = repository.rescue_local_packs({pack.pack_id: pack.nbytes for pack in packs})  # 9
        if gone:
            repository.manifests.withdraw(name)
            raise ConflictError(
                "packs vanished during the commit",
                where=repository.backend.root,
                todo="find the process that removes files from the store, then commit again",
                pack_ids=sorted(pack_id.hex() for pack_id in gone),
            )
        repository.manifests.note_published(seq)
        repository.renew_file_times(packs)
        return Receipt(
            step=header.step,
            seq=header.seq,
            checkpoint_id=header.checkpoint_id.hex(),
            bytes_state=header.bytes_state,
            bytes_written=header.bytes_written,
            chunks_new=header.chunks_new,
            chunks_reused=header.chunks_reused,
            chunks_delta=merged.chunks_delta,
            chunks_derived=merged.chunks_derived,
            seconds={**watch.seconds, "total": watch.total()},
            engine=repository.engine_name,
            warnings=merged.warnings,
        )
