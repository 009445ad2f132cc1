"""Put temporary folders on a disk: direct I/O and full disks are tested there."""

from __future__ import annotations

import re

import pytest


@pytest.fixture
def tmp_path(tmp_path_factory, request):
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
