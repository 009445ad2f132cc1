"""Encode one chunk by itself, against a base, or as the rounding of a base; and decode it.

A frame names the steps that made its payload, in order:

- no step: the plain bytes;
- one codec (``const``, ``planes``, ``zstd``, ``lz4``): the chunk coded by itself;
- ``delta`` and one codec: the coded difference from a base of the same length;
- ``rounded``: the bf16 or fp16 rounding of an fp32 base;
- one step of ``QUANTIZED_STEPS``: a quantized chunk. What it decodes to is what was committed.

Delta (id 5): each element minus the element of the base, as words that are small where both are close. Config: one
byte, 1 if the elements are floats, which are subtracted as integers in the order of the numbers, else 0. The words are
byte planes, as the plane coder needs them. The difference is exact for all values, NaN, infinities and -0 included.

Rounded (id 6): each element is its fp32 base rounded to the nearest, ties to even. Model weights that are stored with
their fp32 masters take one byte a chunk. Config: one byte, 1 for bf16, 2 for fp16. The payload is one zero byte. The
base is twice as long as the chunk.

Invariants:
- Decoding with the same base gives the encoded bytes. A payload is never larger than the plain bytes.
- The same bytes with the same parameters are always coded in the same way.
- A chunk may be decoded onto its base: the destination is written only after all planes have been decoded.
- For any payload, decoding writes the destination or raises, and reads the base within its length.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, cast

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import (
    WIDTHS,
    Codec,
    CodecStep,
    ConstCodec,
    Encoded,
    EncodeParams,
    Lz4Codec,
    Scratch,
    ZstdCodec,
    compress_lz4,
    require_elements,
)
from ckstore.codec.kernels import SAMPLE_NBYTES
from ckstore.codec.planes import PLAIN_WORDS, PlanesCodec, coded_bits, sample_of, take_sample
from ckstore.config import Compression
from ckstore.errors import MalformedError, UnsupportedError, UsageError

__all__ = [
    "CODECS",
    "QUANTIZED_STEPS",
    "SAMPLE_NBYTES",
    "Encoded",
    "Scratch",
    "base_nbytes",
    "decode",
    "encode",
    "encode_delta",
    "encode_rounded",
    "estimate_delta",
    "estimate_full",
    "sample_of",
]

_CONST, _PLANES, _ZSTD, _LZ4 = ConstCodec(), PlanesCodec(), ZstdCodec(), Lz4Codec()

CODECS: Mapping[int, Codec] = {codec.codec_id: codec for codec in (_CONST, _PLANES, _ZSTD, _LZ4)}
"""The codecs that need no base, by id. An id on disk is never given to another codec."""

QUANTIZED_STEPS: Mapping[int, str] = {
    7: "grid",
    8: "moment2",
    9: "moment1",
    10: "codebook",
    11: "outer",
    12: "outer1",
    13: "outer2",
}
"""Codec ids and names of the steps of quantized chunks."""

_QUANTIZED_MODULE = "ckstore.quant.chunk_codec"
"""The module that decodes them. It is loaded with the first quantized chunk, so exact checkpoints never load it."""

_SAVING_PART = 64
"""A coding must save at least one part in this many to be worth the reader's time."""


class _QuantizedCodec(Protocol):
    """What the module of quantized steps provides."""

    STEPS_WITH_BASE: Collection[int]

    def base_nbytes_of(self, steps: Sequence[CodecStep], plain_nbytes: int) -> int:
        """Return the length of the base; 0 for a step without base."""
        ...

    def decode(
        self,
        payload: memoryview,
        steps: Sequence[CodecStep],
        *,
        width: int,
        destination: memoryview,
        scratch: Scratch,
        base: memoryview | None = None,
    ) -> None:
        """Write the reconstruction of one chunk."""
        ...


@functools.cache
def _quantized_codec() -> _QuantizedCodec:
    return cast(_QuantizedCodec, importlib.import_module(_QUANTIZED_MODULE))


def encode(plain: memoryview, *, width: int, is_float: bool, compression: Compression, scratch: Scratch) -> Encoded:
    """Code one chunk by itself. The parts may alias ``plain`` and ``scratch`` and are valid until its next use.

    Args:
        plain: The bytes of the chunk.
        width: Bytes of an element: 1, 2, 4 or 8. A chunk that is not a multiple of it is stored plain.
        is_float: The elements are floating-point numbers, or pairs of them.
        compression: How much time may be spent.
        scratch: Memory of this thread.

    Raises:
        UsageError: The width is not one of these, or the chunk is larger than the scratch.
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
    params = EncodeParams(width, rotate, compression, kernels.plane_bits(plain, width, rotate))
    for codec in _candidates(plain, params, is_float, scratch):
        encoded = codec.encode(plain, params, scratch)
        if encoded is not None and _is_small_enough(encoded, plain.nbytes):
            return encoded
    return raw


def _candidates(plain: memoryview, params: EncodeParams, is_float: bool, scratch: Scratch) -> list[Codec]:
    """Return the codecs that a sample says may save enough, the best first."""
    # A chunk that is constant only in its sample costs one comparison more.
    constant: list[Codec] = [] if any(params.plane_bits) else [_CONST]
    costs: list[tuple[float, Codec]] = [(coded_bits(params.plane_bits) / (8 * params.width), _PLANES)]
    if params.compression == "best":
        sample = take_sample(plain, params.width, scratch)
        costs.append((len(scratch.zstd.compress(sample, "generic")) / sample.nbytes, _ZSTD))
    elif not is_float:
        sample = take_sample(plain, params.width, scratch)
        costs.append((len(compress_lz4(sample)) / sample.nbytes, _LZ4))
    costs.sort(key=lambda pair: pair[0])
    return constant + [codec for cost, codec in costs if cost < 1 - 1 / _SAVING_PART]


def _is_small_enough(encoded: Encoded, plain_nbytes: int) -> bool:
    return encoded.nbytes < plain_nbytes - plain_nbytes // _SAVING_PART


def encode_delta(
    plain: memoryview, base: memoryview, *, width: int, is_float: bool, compression: Compression, scratch: Scratch
) -> Encoded | None:
    """Code the difference of a chunk from its base; None if that does not save enough against plain bytes.

    Args:
        plain: The bytes of the chunk.
        base: The bytes of another chunk of the same length.
        width: Bytes of an element: 1, 2, 4 or 8.
        is_float: The elements are floating-point numbers, or pairs of them.
        compression: How much time may be spent.
        scratch: Memory of this thread. The parts may alias it and are valid until its next use.

    Raises:
        UsageError: The lengths differ, the width is not one of these, or the chunk is larger than the scratch.
    """
    plain, base = _flat(plain), _flat(base)
    if width not in WIDTHS or plain.nbytes > scratch.chunk_nbytes_max or base.nbytes != plain.nbytes:
        raise UsageError(f"a base of {base.nbytes} bytes cannot be subtracted from {plain.nbytes} of width {width}")
    if compression == "none" or not plain.nbytes or plain.nbytes % width:
        return None
    config = delta_config(is_float=is_float)
    plane_bits = delta_bits(plain, base, width=width, config=config)
    if coded_bits(plane_bits) >= 8 * len(plane_bits) * (1 - 1 / _SAVING_PART):
        return None
    split = scratch.planes(plain.nbytes)
    subtract_base(plain, base, split, width=width, config=config)
    coded = _PLANES.encode_planes(split, EncodeParams(width, False, compression, plane_bits), scratch)
    if not _is_small_enough(coded, split.nbytes):
        return None
    return Encoded(((DELTA_ID, config), *coded.steps), coded.parts, width)


def encode_rounded(plain: memoryview, base: memoryview, *, scratch: Scratch) -> Encoded | None:
    """Code a chunk in one byte if it is bit for bit its fp32 base, rounded to bf16 or fp16; else return None.

    Raises:
        UsageError: The chunk is larger than the scratch.
    """
    plain = _flat(plain)
    if plain.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"a chunk of {plain.nbytes} bytes is larger than the scratch of {scratch.chunk_nbytes_max}")
    config = rounding_config(plain, _flat(base))
    if config is None:
        return None
    payload = [memoryview(ROUNDED_PAYLOAD)]
    return Encoded(((ROUNDED_ID, config),), payload, ROUNDED_WIDTH)


def base_nbytes(steps: Sequence[CodecStep], plain_nbytes: int) -> int:
    """Return the length of the base that a chunk of ``plain_nbytes`` with these steps needs; 0 if it needs none.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    ids = tuple(codec_id for codec_id, _ in steps)
    if ids == (ROUNDED_ID,):
        require_rounding_config(steps[0][1])
        return 2 * plain_nbytes
    if ids and ids[0] in QUANTIZED_STEPS:
        return _quantized_codec().base_nbytes_of(steps, plain_nbytes)
    is_delta = ids[:1] == (DELTA_ID,)
    if len(ids) != 2 if is_delta else len(ids) > 1:
        raise UnsupportedError(f"unknown combination of codecs {ids}", todo="upgrade ckstore")
    if is_delta:
        require_delta_config(steps[0][1])
    for codec_id in ids[is_delta:]:
        _codec_of(codec_id)
    return plain_nbytes if is_delta else 0


def decode(
    payload: memoryview,
    steps: Sequence[CodecStep],
    *,
    width: int,
    destination: memoryview,
    scratch: Scratch,
    base: memoryview | None = None,
) -> None:
    """Write exactly the plain bytes of one chunk into ``destination``.

    Args:
        payload: The stored bytes.
        steps: The codecs that made them.
        width: Bytes of an element.
        destination: Receives the chunk.
        scratch: Memory of this thread.
        base: The plain bytes of the base, ``base_nbytes`` long, if the steps need one. A base that is as long as the
            chunk may be the memory of ``destination`` itself; any other base must not overlap it.

    Raises:
        CorruptError: The payload does not decode to the expected number of bytes, or the base is missing, superfluous
            or of another length.
        UnsupportedError: A newer version made the frame.
        UsageError: The destination is larger than the scratch.
    """
    payload, destination = _flat(payload), _flat(destination)
    base = _checked_base(steps, destination.nbytes, base, scratch)
    codec_id, config = steps[0] if steps else (0, b"")
    if codec_id in QUANTIZED_STEPS:
        _quantized_codec().decode(payload, steps, width=width, destination=destination, scratch=scratch, base=base)
        return
    if base is None:
        _decode_alone(payload, steps, width, destination, scratch)
        return
    if codec_id == ROUNDED_ID:
        round_base(payload, base, destination, width=width, config=config)
        return
    require_elements(destination.nbytes, width)
    planes = _difference_planes(payload, steps[1], width, destination.nbytes, scratch)
    add_base(planes, base, destination, width=width, config=config)


def _checked_base(
    steps: Sequence[CodecStep], nbytes: int, base: memoryview | None, scratch: Scratch
) -> memoryview | None:
    """Return the base as bytes after checking that it is what the steps of a chunk of ``nbytes`` need.

    Raises:
        CorruptError: It is missing, superfluous or of another length.
        UnsupportedError: A newer version made the frame.
        UsageError: The chunk is larger than the scratch.
    """
    if nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"a chunk of {nbytes} bytes is larger than the scratch of {scratch.chunk_nbytes_max}")
    needed = base_nbytes(steps, nbytes)
    if (base is not None) != (bool(steps) and _needs_base(steps[0][0])):
        raise MalformedError("a chunk has a base that it does not need, or lacks one that it needs")
    base = None if base is None else _flat(base)
    if base is not None and base.nbytes != needed:
        raise MalformedError(f"the base has {base.nbytes} bytes instead of {needed}")
    return base


def _needs_base(codec_id: int) -> bool:
    if codec_id in QUANTIZED_STEPS:
        return codec_id in _quantized_codec().STEPS_WITH_BASE
    return codec_id in (DELTA_ID, ROUNDED_ID)


def _decode_alone(
    payload: memoryview, steps: Sequence[CodecStep], width: int, destination: memoryview, scratch: Scratch
) -> None:
    """Decode a chunk that has no base: plain bytes, or the output of one codec."""
    if not steps:
        if payload.nbytes != destination.nbytes:
            raise MalformedError(f"{payload.nbytes} plain bytes are stored instead of {destination.nbytes}")
        kernels.copy_bytes(payload, destination)
        return
    ((codec_id, config),) = steps
    _codec_of(codec_id).decode(payload, config, width=width, destination=destination, scratch=scratch)


def _difference_planes(
    payload: memoryview, step: CodecStep, width: int, nbytes: int, scratch: Scratch
) -> list[memoryview]:
    """Return the byte planes of a difference that one codec has coded."""
    codec_id, config = step
    if codec_id == _PLANES.codec_id and config == PLAIN_WORDS:
        return _PLANES.decode_planes(payload, width=width, nbytes=nbytes, scratch=scratch)
    words, split = scratch.planes(nbytes), scratch.decoded(nbytes)
    _decode_alone(payload, [step], width, words, scratch)
    kernels.split_planes(words, split, width, False)
    count = nbytes // width
    return [split[plane * count : (plane + 1) * count] for plane in range(width)]


def _codec_of(codec_id: int) -> Codec:
    """Return the codec with this id.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if codec_id not in CODECS:
        raise UnsupportedError(f"unknown codec {codec_id}", todo="upgrade ckstore", codec_id=codec_id)
    return CODECS[codec_id]


def estimate_full(sample: memoryview, width: int, is_float: bool) -> float:
    """Estimate from a chunk's sample the bits per element of the chunk coded by itself."""
    if not sample.nbytes or sample.nbytes % width:
        return 8.0 * width
    return coded_bits(kernels.plane_bits(_flat(sample), width, is_float and width > 1))


def estimate_delta(sample: memoryview, base_sample: memoryview, width: int, is_float: bool) -> float:
    """Estimate the bits per element of a chunk's difference from its base; 0.0 if the samples are equal.

    ``sample_of`` must have taken both samples, from chunks of the same length and with the same width.
    """
    sample, base_sample = _flat(sample), _flat(base_sample)
    if kernels.equal_bytes(sample, base_sample):
        return 0.0
    if sample.nbytes % width or base_sample.nbytes != sample.nbytes:
        return 8.0 * width
    config = delta_config(is_float=is_float)
    return coded_bits(delta_bits(sample, base_sample, width=width, config=config))


def _flat(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


DELTA_NAME, DELTA_ID = "delta", 5
INTEGERS, FLOATS = b"\x00", b"\x01"

ROUNDED_NAME, ROUNDED_ID = "rounded", 6
ROUNDED_WIDTH = 2
ROUNDED_PAYLOAD = b"\x00"
BF16, FP16 = b"\x01", b"\x02"


def delta_config(*, is_float: bool) -> bytes:
    """Return the config of a delta."""
    return FLOATS if is_float else INTEGERS


def require_delta_config(config: bytes) -> None:
    """Check the config of a delta.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (INTEGERS, FLOATS):
        raise UnsupportedError("unknown config of codec delta", where=config.hex(), todo="upgrade ckstore")


def subtract_base(plain: memoryview, base: memoryview, planes_out: memoryview, *, width: int, config: bytes) -> None:
    """Write the byte planes of ``plain`` minus ``base``, one after another."""
    kernels.split_delta(plain, base, planes_out, width, config == FLOATS)


def delta_bits(plain: memoryview, base: memoryview, *, width: int, config: bytes) -> list[float]:
    """Estimate from a sample the bits per byte of each coded plane that ``subtract_base`` makes."""
    return kernels.delta_bits(plain, base, width, config == FLOATS)


def add_base(
    planes: Sequence[memoryview], base: memoryview, destination: memoryview, *, width: int, config: bytes
) -> None:
    """Write the chunk from the planes of its difference; ``base`` and ``destination`` may be the same memory."""
    kernels.merge_delta(planes, base, destination, width, config == FLOATS)


def rounding_config(plain: memoryview, base: memoryview) -> bytes | None:
    """Return the config by which rounding ``base`` gives exactly ``plain``, or None."""
    if not plain.nbytes or plain.nbytes % ROUNDED_WIDTH or base.nbytes != 2 * plain.nbytes:
        return None
    return next((config for config in (BF16, FP16) if kernels.is_rounding(base, plain, config[0])), None)


def require_rounding_config(config: bytes) -> None:
    """Check the config of a rounding.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (BF16, FP16):
        raise UnsupportedError("unknown config of codec rounded", where=config.hex(), todo="upgrade ckstore")


def round_base(payload: memoryview, base: memoryview, destination: memoryview, *, width: int, config: bytes) -> None:
    """Write the rounded elements of ``base``, which does not overlap the destination.

    Raises:
        MalformedError: The payload is not one zero byte, or the destination is not whole elements of two bytes.
    """
    if bytes(payload[:2]) != ROUNDED_PAYLOAD:
        raise MalformedError(f"a rounded chunk has a payload of {payload.nbytes} bytes instead of one zero byte")
    if width != ROUNDED_WIDTH or destination.nbytes == 0 or destination.nbytes % ROUNDED_WIDTH:
        raise MalformedError(f"a rounded chunk of {destination.nbytes} bytes and width {width} is not bf16 or fp16")
    kernels.round_floats(base, destination, config[0])
