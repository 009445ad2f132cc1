"""The doors for tests into an open store: its repository on disk, and the saver that writes its background commits.

Tests reach the inside of a store by these functions only, so that attributes can be renamed without touching tests.
Nothing here is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.background.client import Saver
    from ckstore.background.commits import BackgroundCommits
    from ckstore.delta.base_cache import BaseCache
    from ckstore.store.repository import Repository
    from ckstore.verbs.reading import Handle


def repository_of(store: Handle) -> Repository:
    """Return the backend, manifests, tags, packs and lease of an open store and run."""
    return store._repository


def background_of(store: Store) -> BackgroundCommits:
    """Return the trainer's side of the background commits of an open store, which the first of them makes."""
    assert store._background is not None, "no background commit was made and nothing was prewarmed"
    return store._background


def guard_memory(store: Store, owner: Any) -> None:
    """Have an owner say which memory is copied behind the guard, in place of attached optimizers.

    Args:
        store: An open store.
        owner: Has ``spans()``, a list of (address, bytes), and ``release()``.
    """
    store._guarded = owner


def bases_of(store: Store) -> BaseCache:
    """Return what the next commit of an open store is coded against, and the memory that this takes."""
    assert store._bases is not None, "nothing was committed or restored, or the store is closed"
    return store._bases


def saver_of(store: Store) -> Saver | None:
    """Return the saver process of an open store, or None where none was started."""
    return None if store._background is None else store._background._saver
