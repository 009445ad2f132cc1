"""Provide the lease of a run on a test's backend."""

from __future__ import annotations

import pytest

from ckstore.clock import SYSTEM_CLOCK
from ckstore.store.lease import Lease


@pytest.fixture
def lease(backend):
    """A lease that is released when the test ends."""
    made = Lease(backend, "main", SYSTEM_CLOCK)
    yield made
    made.release()
