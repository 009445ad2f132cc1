"""The contents of a checkpoint, tensor by tensor, from its manifest. No tensor is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ckstore.display import repr_of_summary
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import World, plain_manifest, world_of
from ckstore.format.replay_form import described, replay_form_of
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import TensorNode, format_path, leaves_of
from ckstore.results import Info


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor of the state.

    Attributes:
        path: Its dotted path.
        library: ``"torch"``, ``"numpy"``, or ``"bytes"``.
        dtype: The library's name of the element type.
        shape: Length of each dimension.
        nbytes: Bytes of the whole storage that it views.
        stored_nbytes: Bytes of the frames of that storage; None if it shares a frame with others.
        shares_with: The first path that views the same storage, or None.
    """

    path: str
    library: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored_nbytes: int | None
    shares_with: str | None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Everything under one first key. Frames that groups share are split in proportion to plain bytes."""

    key: str
    tensor_count: int
    value_count: int
    nbytes: int
    stored_nbytes: int


@dataclass(frozen=True, slots=True)
class PackRow:
    """A pack that the checkpoint needs, and how much of it."""

    pack_id: str
    nbytes: int
    used_nbytes: int
    frame_count: int
    tier: str


@dataclass(frozen=True, slots=True)
class LossRow:
    """A tensor that is stored with a loss, and its error.

    Attributes:
        path: Its dotted path.
        role: ``"weight"``, ``"first"`` or ``"second"`` moment, or ``"rounded"``.
        method: How it was quantized.
        numbers: The method's parameters.
        bits: Stored bits per element when it was committed.
        max_abs: Largest absolute error of an element.
        rel_rms: RMS error relative to the RMS of the values; infinite if these are all zero.
        kept: Share of the elements with a nonzero code.
        hops: Number of lossy checkpoints since it was exact, including this one.
        spike: Largest |update| / lr that the next step of Adam could make; None if unknown.
    """

    path: str
    role: str
    method: str
    numbers: dict[str, float]
    bits: float
    max_abs: float
    rel_rms: float
    kept: float
    hops: int
    spike: float | None


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint.

    ``base_nbytes`` are the bytes of frames that are needed only as bases. ``world`` says which ranks saved it; None: a
    single process.
    """

    info: Info
    tensors: tuple[TensorRow, ...]
    groups: tuple[GroupRow, ...]
    packs: tuple[PackRow, ...]
    base_nbytes: int
    losses: tuple[LossRow, ...] = ()
    world: World | None = None

    __repr__ = repr_of_summary


def contents_of(manifest: Manifest, info: Info) -> Contents:
    """Return the contents of a checkpoint."""
    form = replay_form_of(manifest)
    if form is not None:
        manifest = described(manifest, form)
    world, manifest = world_of(manifest.tree), plain_manifest(manifest)
    own = {chunk.chunk_id for chunk in manifest.chunks}
    base_nbytes = sum(frame.frame_nbytes for frame in manifest.frames if frame.chunk_id not in own)
    tensors, groups, packs = _tensor_rows(manifest), _group_rows(manifest), _pack_rows(manifest)
    return Contents(info, tensors, groups, packs, base_nbytes, _loss_rows(manifest), world)


def _loss_rows(manifest: Manifest) -> tuple[LossRow, ...]:
    path_of: dict[int, str] = {}
    for path, leaf in leaves_of(manifest.tree) if manifest.losses else ():
        if isinstance(leaf, TensorNode):
            path_of.setdefault(manifest.tensors[leaf.tensor].storage, format_path(path))
    return tuple(
        LossRow(
            path=path_of.get(loss.storage, ""),
            role=loss.role,
            method=loss.method,
            numbers=dict(loss.numbers),
            bits=loss.bits,
            max_abs=loss.max_abs,
            rel_rms=loss.rel_rms,
            kept=loss.kept,
            hops=loss.hops,
            spike=loss.spike,
        )
        for loss in manifest.losses
    )


def _stored_by_chunk(manifest: Manifest) -> dict[bytes, int]:
    return {bytes(frame.chunk_id): frame.frame_nbytes for frame in manifest.frames}


def _tensor_rows(manifest: Manifest) -> tuple[TensorRow, ...]:
    stored = _stored_by_chunk(manifest)
    first_path: dict[int, str] = {}
    rows = []
    for path, leaf in leaves_of(manifest.tree):
        if not isinstance(leaf, TensorNode):
            continue
        spec: TensorSpec = manifest.tensors[leaf.tensor]
        shown = format_path(path)
        rows.append(
            TensorRow(
                path=shown,
                library=spec.library,
                dtype=spec.dtype,
                shape=spec.shape,
                nbytes=manifest.storages[spec.storage].nbytes,
                stored_nbytes=_stored_of_storage(manifest, spec.storage, stored),
                shares_with=first_path.get(spec.storage),
            )
        )
        first_path.setdefault(spec.storage, shown)
    return tuple(rows)


def _stored_of_storage(manifest: Manifest, storage: int, stored: dict[bytes, int]) -> int | None:
    total = 0
    for piece in manifest.storages[storage].pieces:
        chunk = manifest.chunks[piece.chunk]
        if piece.nbytes != chunk.nbytes:
            return None
        total += stored[bytes(chunk.chunk_id)]
    return total


def _group_rows(manifest: Manifest) -> tuple[GroupRow, ...]:
    tensors: dict[str, int] = {}
    values: Counter[str] = Counter()
    storages: dict[str, set[int]] = {}
    for path, leaf in leaves_of(manifest.tree):
        key = format_path(path[:1])
        tensors.setdefault(key, 0)
        if isinstance(leaf, TensorNode):
            tensors[key] += 1
            storages.setdefault(key, set()).add(manifest.tensors[leaf.tensor].storage)
        else:
            values[key] += 1
    used: dict[int, Counter[str]] = {}
    for key, indices in storages.items():
        for index in indices:
            for piece in manifest.storages[index].pieces:
                used.setdefault(piece.chunk, Counter())[key] += piece.nbytes
    stored = _stored_by_chunk(manifest)
    shares: Counter[str] = Counter()
    for chunk, by_key in used.items():
        for key, nbytes in by_key.items():
            shares[key] += round(stored[bytes(manifest.chunks[chunk].chunk_id)] * nbytes / max(1, by_key.total()))
    return tuple(
        GroupRow(
            key=key,
            tensor_count=count,
            value_count=values[key],
            nbytes=sum(manifest.storages[index].nbytes for index in storages.get(key, ())),
            stored_nbytes=shares[key],
        )
        for key, count in tensors.items()
    )


def _pack_rows(manifest: Manifest) -> tuple[PackRow, ...]:
    used: Counter[int] = Counter()
    frames: Counter[int] = Counter()
    for frame in manifest.frames:
        used[frame.pack] += frame.frame_nbytes
        frames[frame.pack] += 1
    return tuple(
        PackRow(pack.pack_id.hex(), pack.nbytes, used[index], frames[index], pack.tier)
        for index, pack in enumerate(manifest.packs)
    )
