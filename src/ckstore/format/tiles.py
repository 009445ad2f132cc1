"""Tiles: how a tensor that is cut along several dimensions lies in its storage.

The storage has the tiles in lexicographic order of their places; each tile is C-contiguous. A tensor that is cut along
its first dimension only is row-major, and has no cuts.
"""

from __future__ import annotations

from typing import NamedTuple


class Box(NamedTuple):
    """A block of a tensor: where it begins, and its lengths, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Cuts = tuple[tuple[int, ...], ...]
"""For each dimension, where tiles begin, without 0. Empty: the tensor is row-major."""
