"""The saver: background commits in a process of their own, which outlives the trainer until they are published."""

from __future__ import annotations
