"""Lossy values: changes and moments as codes of few bits, with the error that was made."""

from __future__ import annotations
