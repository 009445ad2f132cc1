"""Folders in memory: the disk is the subject of no unit test but those of ``io``."""

from __future__ import annotations

from support.memory_folders import tmp_path as tmp_path
