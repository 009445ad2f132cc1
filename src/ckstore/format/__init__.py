"""Bytes to dataclasses and back: pure functions; no file, no clock, no network.

``docs/FORMAT.md`` is normative for every byte made or read here. What an encoder of this package writes, its
decoder reads; what a decoder refuses, its encoder refuses to write.
"""

from __future__ import annotations
