"""How one chunk can be stored: coded, as a residual of its base, or as a rounding of it; and back.

A frame names its steps in the order in which they made the payload. Coded: none, or one step of ``codec``.
Residual: ``delta``, then one step of ``codec`` for the words that it leaves. Rounded: that one step. With a loss: one
step of ``lossy_forms``, whose chunk is the reconstruction and not what was given.

Invariants:
- What is encoded decodes to itself, with the same base; no form is larger than the plain bytes.
- A delta may be decoded onto its base: the destination is written only when all its planes are decoded.
- Whatever a payload says, decoding writes the destination or raises; the base is read within its length.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, cast

from ckstore.codec import derived, kernels, ordered
from ckstore.codec import steps as chain
from ckstore.codec.base import CodecStep
from ckstore.codec.kernels import SAMPLE_NBYTES
from ckstore.codec.planes import PLAIN_WORDS, coded_bits, sample_of
from ckstore.codec.steps import PLANES, Encoded, Scratch, codec_of, encode, scratch_nbytes
from ckstore.config import Compression
from ckstore.errors import MalformedError, UnsupportedError, UsageError

__all__ = [
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
    "scratch_nbytes",
]

NO_BYTES = memoryview(b"")

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


def encode_delta(
    plain: memoryview, base: memoryview, *, width: int, is_float: bool, compression: Compression, scratch: Scratch
) -> Encoded | None:
    """Code what is left of a chunk when its base is subtracted; None where that does not pay against plain bytes.

    Args:
        plain: The bytes of the chunk.
        base: As many bytes of another one.
        width: Bytes of an element: 1, 2, 4 or 8.
        is_float: The elements are floating-point numbers, or pairs of them.
        compression: How much time may be spent.
        scratch: Memory of this thread; the parts may alias it and last until it is used again.

    Raises:
        UsageError: The lengths differ, the width is none of these, or the scratch is too small.
    """
    plain, base = _flat(plain), _flat(base)
    if width not in ordered.WIDTHS or plain.nbytes > scratch.chunk_nbytes_max or base.nbytes != plain.nbytes:
        raise UsageError(f"{plain.nbytes} bytes of width {width} cannot be subtracted from {base.nbytes}")
    if compression == "none" or not plain.nbytes or plain.nbytes % width:
        return None
    config = ordered.config_of(is_float=is_float)
    plane_bits = ordered.residual_bits(plain, base, width=width, config=config)
    if not chain.is_worth_coding(plane_bits):
        return None
    split = scratch.planes(plain.nbytes)
    ordered.subtract(plain, base, split, width=width, config=config)
    coded = chain.encode_planes(split, plane_bits, width=width, compression=compression, scratch=scratch)
    return None if coded is None else Encoded(((ordered.CODEC_ID, config), *coded.steps), coded.parts, width)


def encode_rounded(plain: memoryview, base: memoryview, *, scratch: Scratch) -> Encoded | None:
    """Return one byte if the chunk is, element by element and bit by bit, its base of fp32 rounded to bf16 or fp16.

    Raises:
        UsageError: The chunk is larger than the scratch is made for.
    """
    plain = _flat(plain)
    if plain.nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"{plain.nbytes} bytes are more than the scratch is made for")
    config = derived.rounding_of(plain, _flat(base))
    if config is None:
        return None
    return Encoded(((derived.CODEC_ID, config),), [memoryview(derived.PAYLOAD)], derived.WIDTH)


def base_nbytes(steps: Sequence[CodecStep], plain_nbytes: int) -> int:
    """Return how many bytes of a base a chunk of ``plain_nbytes`` with these steps needs; 0: it has none.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    chain_of_ids = tuple(codec_id for codec_id, _ in steps)
    if chain_of_ids == (derived.CODEC_ID,):
        derived.require_known(steps[0][1])
        return 2 * plain_nbytes
    if chain_of_ids and chain_of_ids[0] in QUANTIZED_STEPS:
        return _quantized_codec().base_nbytes_of(steps, plain_nbytes)
    is_delta = chain_of_ids[:1] == (ordered.CODEC_ID,)
    if len(chain_of_ids) != 2 if is_delta else len(chain_of_ids) > 1:
        raise UnsupportedError(f"chain of codecs {chain_of_ids}", todo="upgrade ckstore")
    if is_delta:
        ordered.require_known(steps[0][1])
    for codec_id in chain_of_ids[is_delta:]:
        codec_of(codec_id)
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
        steps: How they were made.
        width: Bytes of an element.
        destination: Where the chunk goes.
        scratch: Memory of this thread.
        base: The plain bytes of the base, ``base_nbytes`` of them, if the steps need one. One that is as long as the
            chunk may be the very memory of ``destination``; otherwise they do not overlap.

    Raises:
        CorruptError: The payload does not decode to that many bytes, or the base is missing, superfluous or of
            another length.
        UnsupportedError: A newer version made the frame.
        UsageError: The destination is larger than the scratch is made for.
    """
    payload, destination = _flat(payload), _flat(destination)
    base = _base_for(steps, destination.nbytes, base, scratch)
    codec_id, config = steps[0] if steps else (0, b"")
    if codec_id in QUANTIZED_STEPS:
        _quantized_codec().decode(payload, steps, width=width, destination=destination, scratch=scratch, base=base)
        return
    if base is None:
        chain.decode(payload, steps, width=width, destination=destination, scratch=scratch)
        return
    if codec_id == derived.CODEC_ID:
        derived.round_base(payload, base, destination, width=width, config=config)
        return
    ordered.require_elements(destination.nbytes, width)
    planes = _residual_planes(payload, steps[1], width, destination.nbytes, scratch)
    ordered.add(planes, base, destination, width=width, config=config)


def _base_for(steps: Sequence[CodecStep], nbytes: int, base: memoryview | None, scratch: Scratch) -> memoryview | None:
    """Return the base as bytes, if a chunk of so many bytes may have these steps and this base, or none.

    Raises:
        CorruptError: It is missing, superfluous or of another length.
        UnsupportedError: A newer version made the frame.
        UsageError: The chunk is larger than the scratch is made for.
    """
    if nbytes > scratch.chunk_nbytes_max:
        raise UsageError(f"{nbytes} bytes are more than the scratch is made for")
    needed = base_nbytes(steps, nbytes)
    if (base is not None) != (bool(steps) and _has_base(steps[0][0])):
        raise MalformedError("a chunk has a base that it does not need, or needs one that it does not have")
    base = None if base is None else _flat(base)
    if base is not None and base.nbytes != needed:
        raise MalformedError(f"the base has {base.nbytes} bytes instead of {needed}")
    return base


def _has_base(codec_id: int) -> bool:
    if codec_id in QUANTIZED_STEPS:
        return codec_id in _quantized_codec().STEPS_WITH_BASE
    return codec_id in (ordered.CODEC_ID, derived.CODEC_ID)


def estimate_full(sample: memoryview, width: int, is_float: bool, scratch: Scratch) -> float:
    """Return the bits that coding will take for each element of the chunk that this is the sample of."""
    if not sample.nbytes or sample.nbytes % width:
        return 8.0 * width
    return coded_bits(kernels.plane_bits(_flat(sample), width, is_float and width > 1))


def estimate_delta(sample: memoryview, base_sample: memoryview, width: int, is_float: bool, scratch: Scratch) -> float:
    """Return the bits that coding will take for each element of a chunk less its base; 0.0 if they are equal.

    Both samples were taken by ``sample_of`` of chunks of one length, with one width.
    """
    sample, base_sample = _flat(sample), _flat(base_sample)
    if kernels.equal_bytes(sample, base_sample):
        return 0.0
    if sample.nbytes % width or base_sample.nbytes != sample.nbytes:
        return 8.0 * width
    config = ordered.config_of(is_float=is_float)
    return coded_bits(ordered.residual_bits(sample, base_sample, width=width, config=config))


def _residual_planes(
    payload: memoryview, step: CodecStep, width: int, nbytes: int, scratch: Scratch
) -> list[memoryview]:
    """Return the byte planes of the words that the step after ``delta`` holds."""
    codec_id, config = step
    if codec_id == PLANES.codec_id and config == PLAIN_WORDS:
        return PLANES.decode_planes(payload, width=width, nbytes=nbytes, scratch=scratch)
    words, split = scratch.planes(nbytes), scratch.decoded(nbytes)
    chain.decode(payload, [step], width=width, destination=words, scratch=scratch)
    kernels.split_planes(words, split, width, False)
    count = nbytes // width
    return [split[plane * count : (plane + 1) * count] for plane in range(width)]


def _flat(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else NO_BYTES
