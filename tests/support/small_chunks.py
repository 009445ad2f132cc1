"""Stores whose chunks are small: what happens to states of many chunks is seen on states of little memory."""

from __future__ import annotations

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import Limits
from ckstore.io.local import LocalBackend
from ckstore.store.store_config import create_store


def open_small(place, chunk_nbytes, **options):
    """Open a store, which is made first: in a folder, or in a backend that is empty."""
    backend = place
    if not hasattr(place, "list_names"):
        place.mkdir(exist_ok=True)
        backend = LocalBackend(place)
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=chunk_nbytes))
    return ckstore.open(place, **options)
