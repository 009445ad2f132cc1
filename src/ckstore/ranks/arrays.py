"""What one rank holds of a state: its shards of global tensors. Neither numpy nor torch is needed here."""

from __future__ import annotations

from typing import NamedTuple

from ckstore.format.tiles import Box, Cuts


class Layout(NamedTuple):
    """How a global tensor lies on a device mesh.

    Args:
        mesh_names: Names of the mesh's dimensions; empty if they have none.
        mesh_shape: Lengths of these dimensions.
        mesh_ranks: The global ranks of the mesh, in row-major order.
        placements: The placements as text, such as ``(Shard(dim=0), Replicate())``; for people.
    """

    mesh_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: str


class ArraySpec(NamedTuple):
    """A global tensor of which ranks hold shards. It is the same on every rank that holds one.

    Args:
        shape: The global shape.
        cuts: Where its tiles begin; see ``format/tiles.py``.
        layout: Index of its layout.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    layout: int


class Holding(NamedTuple):
    """A box of a global tensor that this rank holds.

    Args:
        box: The box.
        holders: All ranks that hold the same box, ascending; this one included.
    """

    box: Box
    holders: tuple[int, ...]
