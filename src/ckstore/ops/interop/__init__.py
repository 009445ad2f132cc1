"""Checkpoints of other tools, brought into the history of a run: found, loaded in a child process, committed."""

from __future__ import annotations
