"""One call of ``Store.restore``: choose a checkpoint, prepare the destinations, and fill them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckstore.config import Policy
from ckstore.errors import MissingChunkError
from ckstore.format.manifest import Manifest
from ckstore.restore.plan import narrowed
from ckstore.restore.restore import restore
from ckstore.results import require_exact
from ckstore.state.placement import libraries_needed, prepare_restore
from ckstore.state.tensors import LeafAdapter, loaded_adapters
from ckstore.store.refs import Reference, load_whole, newest_whole, resolve
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What the caller asked for, except which checkpoint; the fields are arguments of ``Store.restore``."""

    into: Any
    only: str | Sequence[str] | None
    device: Any
    exact: bool
    on_progress: Callable[[int, int], None] | None


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored state, and the checkpoint it came from.

    Attributes:
        state: The state.
        manifest: The checkpoint; only the requested leaves where ``only`` was given.
        warnings: Why newer checkpoints were skipped, and what did not fit exactly.
    """

    state: Any
    manifest: Manifest
    warnings: tuple[str, ...]


def restore_reference(
    repository: Repository, policy: Policy, ref: Reference | None, request: RestoreRequest, started: list[int]
) -> Restored:
    """Restore the checkpoint that a reference names; retry if it was replaced in the meantime.

    Args:
        repository: The store and run.
        policy: Threads, memory and checks.
        ref: The checkpoint; None: the newest whole one.
        request: What to restore, and into what.
        started: The seq of each checkpoint whose data is about to be read is appended here, for error handling.

    Raises:
        CkstoreError: As for ``Store.restore``.
    """
    last: tuple[int, int] | None = None
    while True:
        manifest, skipped = _choose(repository, ref)
        started.append(manifest.header.seq)
        try:
            return restore_manifest(repository, policy, manifest, skipped, request)
        except MissingChunkError:
            # A demotion or repack may have replaced the checkpoint, and gc freed its packs, since the manifest was
            # read. Read it again; give up if it is the same one.
            found = (manifest.header.seq, manifest.header.generation)
            if found == last:
                raise
            last = found


def restore_manifest(
    repository: Repository, policy: Policy, manifest: Manifest, skipped: Sequence[str], request: RestoreRequest
) -> Restored:
    """Restore one checkpoint.

    Args:
        repository: The store and run.
        policy: Threads, memory and checks.
        manifest: The checkpoint.
        skipped: Why newer checkpoints were skipped.
        request: What to restore, and into what.

    Raises:
        CkstoreError: As for ``Store.restore``.
    """
    if request.exact:
        require_exact(manifest.header, repository.backend.root)
    if request.only is not None:
        manifest = narrowed(manifest, request.only)
    needs_torch = "torch" in libraries_needed(manifest.tree, manifest.tensors)
    targets = prepare_restore(
        manifest.tree,
        manifest.tensors,
        manifest.storages,
        into=request.into,
        only=request.only,
        device=request.device,
        adapters=_adapters(needs_torch=needs_torch),
    )
    state = restore(repository, manifest, targets, policy, on_progress=request.on_progress)
    for sentence in targets.warnings:
        _log.warning("%s", sentence)
    return Restored(state, manifest, (*skipped, *targets.warnings))


def _choose(repository: Repository, ref: Reference | None) -> tuple[Manifest, list[str]]:
    """Return the checkpoint to restore, and why newer ones were skipped."""
    if not str(ref).startswith(("seq:", "id:")):
        # Any other reference may mean a checkpoint that a saver is about to publish.
        repository.wait_for_orphan()
    if ref is not None:
        return load_whole(repository, resolve(repository, ref), takes_lower=True), []
    manifest, skipped = newest_whole(repository)
    for sentence in skipped:
        _log.warning("%s", sentence)
    return manifest, skipped


def _adapters(*, needs_torch: bool) -> list[LeafAdapter]:
    """Return the tensor libraries that are loaded; load torch first if the checkpoint needs it and it is installed."""
    if needs_torch and importlib.util.find_spec("torch"):
        importlib.import_module("torch")
    return loaded_adapters()
