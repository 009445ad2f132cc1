"""What one rank holds of a state: its shards of global tensors, and everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckstore.format.tensors import TensorSpec
from ckstore.format.tiles import Box, Cuts
from ckstore.format.tree import Path
from ckstore.state.capture import Captured


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


@dataclass(frozen=True, slots=True)
class Unit:
    """One storage of the checkpoint: the bytes of a global tensor, or of a local storage of plain tensors.

    Args:
        path: The path of the first tensor that views it.
        nbytes: Its bytes in the checkpoint.
        element_width: Bytes of one element: 1, 2, 4 or 8.
        is_float: Whether elements are floating-point numbers.
        array: The global tensor; None for a local storage, which other ranks may hold too.
    """

    path: Path
    nbytes: int
    element_width: int
    is_float: bool
    array: ArraySpec | None = None


class Held(NamedTuple):
    """A byte range of a unit, and where this rank has it in memory.

    Args:
        unit: Index of the unit.
        offset: Where the range begins in the unit.
        nbytes: Its length; not 0.
        storage: Index of the local storage that has the bytes, one after another.
        begin: Where they begin there.
        holders: All ranks that hold this range, ascending; empty if they are not known here: for a plain unit, and for
            a shard on a mesh without all ranks.
    """

    unit: int
    offset: int
    nbytes: int
    storage: int
    begin: int
    holders: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RankState:
    """The captured state of one rank.

    Args:
        captured: The state with local tensors and local storages.
        tensors: The tensors of ``captured`` as the checkpoint has them: of a shard the global tensor, row-major or
            flat tiles. Their ``storage`` is the index of a unit.
        units: The units that this rank holds a part of, in the order of the tree.
        held: The byte ranges of units that this rank holds, by unit and offset.
        layouts: How arrays lie on device meshes.
        per_rank: Paths of the parts that were declared ``PerRank``.
        replicated: Paths of the parts that were declared ``Replicated``, each with the share to compare.
    """

    captured: Captured
    tensors: tuple[TensorSpec, ...]
    units: tuple[Unit, ...]
    held: tuple[Held, ...]
    layouts: tuple[Layout, ...] = ()
    per_rank: tuple[Path, ...] = ()
    replicated: tuple[tuple[Path, float], ...] = ()
