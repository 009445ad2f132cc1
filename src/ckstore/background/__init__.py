"""Copies of states into the arena: where each byte goes, when it is copied, and by which threads."""

from __future__ import annotations
