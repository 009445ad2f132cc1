"""One chunk into the fewest bytes that the policy has time for, and back.

Invariants:
- What is stored is never larger than the plain bytes: where no codec pays, there are no steps and the
  payload is the chunk itself.
- The same bytes under the same policy are always coded in the same way.

Codec ids on disk <-> codecs. An id is never given to another codec.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.codec import kernels
from ckstore.codec.base import WIDTHS, Brief, Codec, CodecStep, Encoded
from ckstore.codec.byte_codecs import ConstCodec, Lz4Codec, Scratch, ZstdCodec, scratch_nbytes
from ckstore.codec.byte_codecs import compress as compress_lz4
from ckstore.codec.planes import PlanesCodec, coded_bits, take_sample
from ckstore.config import Compression
from ckstore.errors import MalformedError, UnsupportedError, UsageError

CONST = ConstCodec()
PLANES = PlanesCodec()
ZSTD = ZstdCodec()
LZ4 = Lz4Codec()

CODECS: dict[int, Codec] = {codec.codec_id: codec for codec in (CONST, PLANES, ZSTD, LZ4)}


def codec_of(codec_id: int) -> Codec:
    """Return the codec that frames call by this id.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if codec_id not in CODECS:
        raise UnsupportedError(f"unknown codec {codec_id}", todo="upgrade ckstore", codec_id=codec_id)
    return CODECS[codec_id]


__all__ = [
    "STEP_COUNT_MAX",
    "Encoded",
    "Scratch",
    "decode",
    "encode",
    "encode_planes",
    "is_worth_coding",
    "scratch_nbytes",
]

STEP_COUNT_MAX = 1

# Coding that saves less than one part in so many is not worth the time of the reader.
_SAVING_PART = 64


def encode(plain: memoryview, *, width: int, is_float: bool, compression: Compression, scratch: Scratch) -> Encoded:
    """Code one chunk; the parts may alias ``plain`` and ``scratch`` and last until the scratch is used again.

    Args:
        plain: The bytes of the chunk.
        width: Bytes of an element: 1, 2, 4 or 8; a chunk that is no multiple of it is stored plain.
        is_float: The elements are floating-point numbers, or pairs of them.
        compression: How much time may be spent.
        scratch: Memory of this thread.

    Raises:
        UsageError: The width is none of these, or the chunk is larger than the scratch is made for.
    """
    plain = _flat(plain)
    if width not in WIDTHS or plain.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(
            "chunk cannot be coded", where=f"{plain.nbytes} bytes, width {width}", todo="give it a larger scratch"
        )
    raw = Encoded((), [plain] if plain.nbytes else [], width)
    if compression == "none" or not plain.nbytes or plain.nbytes % width:
        return raw
    rotate = is_float and width > 1
    brief = Brief(width, rotate, compression, kernels.plane_bits(plain, width, rotate))
    for codec in _candidates(plain, brief, is_float, scratch):
        encoded = codec.encode(plain, brief, scratch)
        if encoded is not None and _pays(encoded, plain.nbytes):
            return encoded
    return raw


def is_worth_coding(plane_bits: Sequence[float]) -> bool:
    """Return whether coding planes of so many bits per byte, as a sample tells, can pay."""
    return coded_bits(plane_bits) < 8 * len(plane_bits) * (1 - 1 / _SAVING_PART)


def encode_planes(
    split: memoryview, plane_bits: Sequence[float], *, width: int, compression: Compression, scratch: Scratch
) -> Encoded | None:
    """Code words that are in byte planes already, ``scratch.planes`` perhaps; None where it does not pay.

    The parts may alias the planes and the scratch, as those of ``encode`` do.

    Args:
        split: The planes, one after another.
        plane_bits: The bits per byte that coding will take in each, as a sample tells.
        width: How many planes there are.
        compression: How much time may be spent.
        scratch: Memory of this thread.
    """
    encoded = PLANES.encode_planes(split, Brief(width, False, compression, plane_bits), scratch)
    return encoded if _pays(encoded, split.nbytes) else None


def decode(
    payload: memoryview, steps: Sequence[CodecStep], *, width: int, destination: memoryview, scratch: Scratch
) -> None:
    """Write exactly the plain bytes of one chunk into ``destination``.

    Raises:
        CorruptError: The payload does not decode to that many bytes.
        UnsupportedError: A newer version made the frame.
        UsageError: The destination is larger than the scratch is made for.
    """
    payload, destination = _flat(payload), _flat(destination)
    if destination.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"{destination.nbytes} bytes are more than the scratch is made for")
    if len(steps) > STEP_COUNT_MAX:
        raise UnsupportedError(f"chain of {len(steps)} codecs", todo="upgrade ckstore")
    if not steps:
        if payload.nbytes != destination.nbytes:
            raise MalformedError(f"{payload.nbytes} plain bytes are stored instead of {destination.nbytes}")
        kernels.copy_bytes(payload, destination)
        return
    ((codec_id, config),) = steps
    codec_of(codec_id).decode(payload, config, width=width, destination=destination, scratch=scratch)


def _pays(encoded: Encoded, plain_nbytes: int) -> bool:
    return encoded.nbytes < plain_nbytes - plain_nbytes // _SAVING_PART


def _flat(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


def _candidates(plain: memoryview, brief: Brief, is_float: bool, scratch: Scratch) -> list[Codec]:
    """Return the codecs that may pay, the best first."""
    # The sample decides; a chunk that only looks constant in it costs one more comparison.
    constant: list[Codec] = [] if any(brief.plane_bits) else [CONST]
    costs: list[tuple[float, Codec]] = [(coded_bits(brief.plane_bits) / (8 * brief.width), PLANES)]
    if brief.compression == "best":
        sample = take_sample(plain, brief.width, scratch)
        costs.append((len(scratch.zstd.compress(sample, "generic")) / sample.nbytes, ZSTD))
    elif not is_float:
        sample = take_sample(plain, brief.width, scratch)
        costs.append((len(compress_lz4(sample)) / sample.nbytes, LZ4))
    costs.sort(key=lambda pair: pair[0])
    return constant + [codec for cost, codec in costs if cost < 1 - 1 / _SAVING_PART]
