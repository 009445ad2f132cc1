"""Protects the settings of background commits: what cannot be is refused, and a policy may carry them."""

from __future__ import annotations

import pytest

from ckstore.errors import UsageError
from ckstore.saver.settings import SaverSettings


@pytest.mark.parametrize(
    "fields",
    [
        {"on_busy": "queue"},
        {"staging_threads": 0},
        {"staging_threads": 65},
        {"saver_nice": 20},
        {"saver_nice": -1},
        {"arena_nbytes_max": 0},
    ],
)
def test_settings_refuse_what_cannot_be(fields):
    (name,) = fields
    with pytest.raises(UsageError, match=name):
        SaverSettings(**fields)


def test_settings_come_from_a_policy_that_has_them():
    class Policy:
        on_busy, staging_threads, saver_nice = "skip", 3, 7

    found = SaverSettings.of(Policy())
    assert (found.on_busy, found.thread_count, found.saver_nice, found.debug_guard) == ("skip", 3, 7, False)
