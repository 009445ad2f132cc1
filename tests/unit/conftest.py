"""Put temporary folders in memory: only the tests of ``io`` need a disk."""

from __future__ import annotations

from support.memory_folders import tmp_path as tmp_path
