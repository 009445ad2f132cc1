"""A checkpoint whose packs are durable and whose manifest is not published yet.

Commit, repack and demote each write one with ``ChunkWriter.write`` and publish it themselves: a commit as a new entry
of the run, a repack and a demotion as the next generation of an entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckstore.commit.base_selection import BaseSelection
from ckstore.commit.chunk_writer import WriteResult
from ckstore.commit.chunking import CommitPlan
from ckstore.errors import BackendError, CkstoreError
from ckstore.format.manifest import ChunkSpec
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Unpublished:
    """What the manifest of a checkpoint says about its chunks, which are durable."""

    plan: CommitPlan
    selection: BaseSelection
    stored: WriteResult

    def chunk_specs(self) -> list[ChunkSpec]:
        """Return the manifest's record of each chunk of the plan."""
        return [
            ChunkSpec(located.frame.chunk_id, chunk.nbytes, chunk.element_width, chunk.is_float)
            for chunk, located in zip(self.plan.chunks, self.stored.frames, strict=True)
        ]


@contextmanager
def packs_removed_on_failure(
    repository: Repository, pack_names: Iterable[str], is_visible: Callable[[], bool]
) -> Iterator[None]:
    """Remove new packs if the block, which publishes their manifest, fails: a full disk gets the space back.

    Packs that the manifest may still need stay, and so do those that cannot be removed: gc removes what is left.

    Args:
        repository: The store.
        pack_names: The new packs.
        is_visible: Whether the manifest is in place. Called after a failure only.
    """
    try:
        yield
    except BaseException as error:
        # A server that did not answer may still make the manifest visible.
        if not (isinstance(error, BackendError) and error.facts.get("is_uncertain")):
            try:
                # Publishing may have failed after the manifest became visible.
                if not is_visible():
                    remove_packs(repository, pack_names)
            except (CkstoreError, OSError) as failure:
                _log.warning("packs of an unpublished checkpoint are left for `ckstore gc` to remove: %s", failure)
        raise


def remove_packs(repository: Repository, pack_names: Iterable[str]) -> None:
    """Remove packs that no manifest names; ignore packs that a collector has already removed."""
    for pack_name in pack_names:
        with suppress(FileNotFoundError):
            repository.backend.unlink(pack_name)
