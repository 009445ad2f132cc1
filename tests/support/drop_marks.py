"""Drop marks as a drop makes them, where a test wants nothing else of it."""

from __future__ import annotations

from ckstore.store.repository import Repository


def mark_dropped(repository: Repository, *seqs: int) -> None:
    """Make drop marks for these seqs of the run of ``repository``, durably; what they name stays in place."""
    intents = dict(zip(seqs, repository.tags.declare_all(seqs, "test"), strict=True))
    repository.manifests.mark_dropped(intents)
    for intent in intents.values():
        repository.tags.retract(intent)
