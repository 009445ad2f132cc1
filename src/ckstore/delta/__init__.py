"""Chunks from other chunks: what is left when a base is subtracted, and what rounding a base gives."""

from __future__ import annotations
