"""How each tensor of a checkpoint is coded, and why: what its frames' headers and its manifest say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckstore.codec import differences
from ckstore.codec.chunk_codec import CODECS, QUANTIZED_STEPS
from ckstore.format.decisions import StorageDecision
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, decode_frame_header
from ckstore.format.manifest import FrameRef, Manifest
from ckstore.format.tree import Path, TensorNode, format_path, leaves_of
from ckstore.hashing import ChunkId, PackId
from ckstore.io.backend import ReadFile
from ckstore.results import Info
from ckstore.store.pack_reader import open_pack
from ckstore.store.repository import Repository

CodingKind = Literal["plain", "coded", "delta", "rounded", "quantized"]

NAMES = {
    differences.DELTA_ID: differences.DELTA_NAME,
    differences.ROUNDED_ID: differences.ROUNDED_NAME,
    **{codec_id: codec.name for codec_id, codec in CODECS.items()},
    **QUANTIZED_STEPS,
}


@dataclass(frozen=True, slots=True)
class ChunkCoding:
    """How one chunk is stored.

    Args:
        steps: Names of the codecs in the order in which they were applied, joined by ``+``; ``"plain"`` for none.
        kind: Whole, or what is done with a base.
        frame: Where, and how deep below its last base.
        frame_nbytes: Bytes of the frame.
    """

    steps: str
    kind: CodingKind
    frame: FrameRef
    frame_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorCoding:
    """How one tensor is stored; of tensors that share memory only the first is listed.

    Attributes:
        path: Its dotted path.
        dtype: Its element type.
        elements: How many.
        nbytes: Plain bytes.
        stored_nbytes: Its share of the frames of its chunks.
        mode: What was chosen for it: ``"full"``, ``"delta"``, ``"derived"``, ``"identical"`` (nothing was written),
            ``"residual"`` (with a loss) or ``"unsampled"``; how it lies now where the manifest does not say.
        steps: The codecs of its chunks, each combination once.
        depth: Bases to be decoded before it, at most.
        full_bits: What coding it whole was to take, in bits per element; None where that was not estimated, here and
            below.
        previous_bits: Against the previous checkpoint.
        keyframe_bits: Against the keyframe.
    """

    path: str
    dtype: str
    elements: int
    nbytes: int
    stored_nbytes: int
    mode: str
    steps: tuple[str, ...]
    depth: int
    full_bits: float | None
    previous_bits: float | None
    keyframe_bits: float | None

    @property
    def stored_bits(self) -> float:
        """Bits per element, as stored."""
        return 8 * self.stored_nbytes / max(1, self.elements)


@dataclass(frozen=True, slots=True)
class Coding:
    """How a checkpoint is coded.

    Attributes:
        info: Which checkpoint.
        base: ``"none"``, ``"previous"`` or ``"keyframe"``; empty where the manifest does not say.
        base_seq: The checkpoint whose chunks serve as bases.
        keyframe_seq: The keyframe it goes back to.
        reason: Why, in a sentence.
        tensors: In the order of the state.
    """

    info: Info
    base: str
    base_seq: int | None
    keyframe_seq: int | None
    reason: str
    tensors: tuple[TensorCoding, ...]


def coding_of(repository: Repository, manifest: Manifest, info: Info) -> Coding:
    """Read the headers of all frames of a checkpoint's chunks, and say what they and the manifest say.

    Raises:
        CorruptError: A header is damaged, or a pack is missing.
    """
    chunks = chunk_codings(repository, manifest)
    decisions = manifest.decisions
    tensors = tuple(
        _tensor_coding(manifest, path, storage, tensor, chunks) for path, storage, tensor in first_tensors(manifest)
    )
    if decisions is None:
        return Coding(info, "", None, None, "", tensors)
    return Coding(info, decisions.base, decisions.base_seq, decisions.keyframe_seq, decisions.reason, tensors)


def first_tensors(manifest: Manifest) -> Iterator[tuple[Path, int, int]]:
    """Yield, for each storage, the path and the index of the first tensor that views it: path, storage, tensor."""
    seen: set[int] = set()
    for path, leaf in leaves_of(manifest.tree):
        if isinstance(leaf, TensorNode):
            storage = manifest.tensors[leaf.tensor].storage
            if storage not in seen:
                seen.add(storage)
                yield path, storage, leaf.tensor


def chunk_codings(repository: Repository, manifest: Manifest) -> list[ChunkCoding]:
    """Read the header of each chunk's frame; chunks in the order of the manifest."""
    frame_of = {frame.chunk_id: frame for frame in manifest.frames}
    frames = [frame_of[ChunkId(chunk.chunk_id)] for chunk in manifest.chunks]
    headers = dict(_headers(repository, manifest, frames))
    return [_chunk_coding(frame, headers[frame.chunk_id]) for frame in frames]


def _headers(
    repository: Repository, manifest: Manifest, frames: Iterable[FrameRef]
) -> Iterator[tuple[ChunkId, FrameHeader]]:
    files: dict[PackId, ReadFile] = {}
    try:
        for frame in sorted(frames, key=lambda frame: (frame.pack, frame.offset)):
            pack = manifest.packs[frame.pack]
            if pack.pack_id not in files:
                files[pack.pack_id] = open_pack(repository, pack)
            file = files[pack.pack_id]
            where = f"{file.name}, offset {frame.offset}"
            content = file.read_at(frame.offset, FRAME_HEADER_NBYTES)
            yield frame.chunk_id, decode_frame_header(content, limits=repository.limits, where=where)
    finally:
        for file in files.values():
            file.close()


def _chunk_coding(frame: FrameRef, header: FrameHeader) -> ChunkCoding:
    ids = [codec_id for codec_id, _ in header.steps]
    kind: CodingKind = "coded" if ids else "plain"
    if ids[:1] == [differences.DELTA_ID]:
        kind = "delta"
    elif ids[:1] == [differences.ROUNDED_ID]:
        kind = "rounded"
    elif ids and ids[0] in QUANTIZED_STEPS:
        kind = "quantized"
    steps = "+".join(NAMES.get(codec_id, f"codec {codec_id}") for codec_id in ids)
    return ChunkCoding(steps or "plain", kind, frame, frame.frame_nbytes)


_MODES = {"plain": "full", "coded": "full", "delta": "delta", "rounded": "derived", "quantized": "residual"}


def _tensor_coding(
    manifest: Manifest, path: Path, storage: int, tensor: int, chunks: Sequence[ChunkCoding]
) -> TensorCoding:
    spec = manifest.storages[storage]
    codings = [chunks[piece.chunk] for piece in spec.pieces]
    shares = (
        coding.frame_nbytes * piece.nbytes / manifest.chunks[piece.chunk].nbytes
        for coding, piece in zip(codings, spec.pieces, strict=True)
    )
    choice = manifest.decisions.storages[storage] if manifest.decisions is not None else None
    lies = sorted({_MODES[coding.kind] for coding in codings})
    choice = choice or StorageDecision(0)
    return TensorCoding(
        path=format_path(path),
        dtype=manifest.tensors[tensor].dtype,
        elements=spec.nbytes // spec.element_width,
        nbytes=spec.nbytes,
        stored_nbytes=round(sum(shares)),
        mode=choice.mode_name if choice.mode else " and ".join(lies) or "empty",
        steps=tuple(sorted({coding.steps for coding in codings})),
        depth=max((coding.frame.depth for coding in codings), default=0),
        full_bits=choice.full_bits,
        previous_bits=choice.previous_bits,
        keyframe_bits=choice.keyframe_bits,
    )
