"""The lease of a run on the backend of a test."""

from __future__ import annotations

import pytest

from ckstore.clock import SYSTEM_CLOCK
from ckstore.store.lease import Lease


@pytest.fixture
def lease(backend):
    """One that is given up when the test ends."""
    made = Lease(backend, "main", SYSTEM_CLOCK)
    yield made
    made.release()
