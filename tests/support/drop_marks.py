"""Drop marks as a drop makes them, where a test wants nothing else of it."""

from __future__ import annotations

from ckstore.store.repository import Parts


def mark_dropped(parts: Parts, *seqs: int) -> None:
    """Make drop marks for these seqs of the run of ``parts``, durably; what they name stays in place."""
    intents = dict(zip(seqs, parts.tags.declare_all(seqs, "test"), strict=True))
    parts.manifests.mark_dropped(intents)
    for intent in intents.values():
        parts.tags.retract(intent)
