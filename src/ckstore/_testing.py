"""Access to the inside of an open store, for ckstore's own tests. Not public.

Tests use only these functions, so that private attributes can be renamed without changing tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.background.client import Saver
    from ckstore.background.commits import BackgroundCommits
    from ckstore.delta.base_cache import BaseCache
    from ckstore.store.repository import Repository


def repository_of(store: Store) -> Repository:
    """Return the backend, manifests, tags, packs and lease of an open store and run."""
    return store._repository


def background_of(store: Store) -> BackgroundCommits:
    """Return the background commits of an open store. They exist after the first background commit or prewarming."""
    side = store._background
    commits = None if side is None else side._commits
    assert commits is not None, "no background commit was made and nothing was prewarmed"
    return commits


def guard_memory(store: Store, owner: Any) -> None:
    """Guard the memory of ``owner``, as ``attach`` guards the tensors of an optimizer.

    Args:
        store: An open store.
        owner: An object with ``spans()``, which returns a list of (address, bytes), and ``release()``.
    """
    store._trainer_side()._guarded = owner


def bases_of(store: Store) -> BaseCache:
    """Return the cache of delta bases for the next commit of an open store."""
    assert store._bases is not None, "nothing was committed or restored, or the store is closed"
    return store._bases


def saver_of(store: Store) -> Saver | None:
    """Return the saver process of an open store, or None if it was not started."""
    side = store._background
    return None if side is None or side._commits is None else side._commits._saver


def journal_of(store: Store) -> BackgroundCommits:
    """Return the background commits of an open store's journal. They exist after the first commit."""
    commits = None if store._journal is None else store._journal._commits
    assert commits is not None, "the store has no journal, or nothing was committed"
    return commits
