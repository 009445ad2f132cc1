"""Jobs of several ranks: their stores are in memory, because no test here is about the disk."""

from support.memory_folders import tmp_path as tmp_path
