"""Folders on a disk: what reads past the page cache, and what fills up, is tested where that is so."""

from __future__ import annotations

import re

import pytest


@pytest.fixture
def tmp_path(tmp_path_factory, request):
    return tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
