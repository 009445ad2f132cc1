"""The hosts of ckstore: torch, and what is built on it. Nothing outside this package imports torch."""

from __future__ import annotations
