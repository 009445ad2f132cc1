"""One chunk into the fewest bytes that the policy has time for, and back.

Invariants:
- What is stored is never larger than the plain bytes: where no codec pays, there are no steps and the
  payload is the chunk itself.
- The same bytes under the same policy are always coded in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckstore import kernels
from ckstore.codec.base import WIDTHS, Brief, Codec, CodecStep, Encoded
from ckstore.codec.lz4 import compress as compress_lz4
from ckstore.codec.planes import ENTROPY_MAX
from ckstore.codec.registry import CONST, LZ4, PLANES, ZSTD, codec_of
from ckstore.codec.sample import plane_entropies, take_sample
from ckstore.codec.scratch import Scratch, scratch_nbytes
from ckstore.config import Compression
from ckstore.errors import MalformedError, UnsupportedError, UsageError

__all__ = ["STEP_COUNT_MAX", "Encoded", "Scratch", "check", "decode", "encode", "scratch_nbytes"]

STEP_COUNT_MAX = 1

# Coding that saves less than one part in so many is not worth the time of the reader.
_SAVING_PART = 64
# The plane coder costs about this much more than the entropy, in bits per byte.
_CODER_LOSS = 0.02


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
    sample = take_sample(plain, width, scratch)
    brief = Brief(width, rotate, compression, plane_entropies(sample, width, rotate, scratch))
    for codec in _candidates(sample, brief, is_float, scratch):
        encoded = codec.encode(plain, brief, scratch)
        if encoded is not None and encoded.nbytes < plain.nbytes - plain.nbytes // _SAVING_PART:
            return encoded
    return raw


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


def check(encoded: Encoded, plain: memoryview, scratch: Scratch) -> bool:
    """Run the decoder over the parts and return whether it gives ``plain`` again."""
    plain = _flat(plain)
    if not encoded.steps:
        return encoded.nbytes == plain.nbytes and all(kernels.equal_bytes(part, plain) for part in encoded.parts)
    ((codec_id, _),) = encoded.steps
    try:
        return codec_of(codec_id).matches(encoded, plain, scratch)
    except MalformedError:
        return False


def _flat(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else memoryview(bytearray())


def _candidates(sample: memoryview, brief: Brief, is_float: bool, scratch: Scratch) -> list[Codec]:
    """Return the codecs that may pay, the best first."""
    # The sample decides; a chunk that only looks constant in it costs one more comparison.
    constant: list[Codec] = [CONST] if max(brief.entropies) < 1e-3 or sample.nbytes <= brief.width else []
    costs: list[tuple[float, Codec]] = [(_planes_cost(brief), PLANES)]
    if brief.compression == "best":
        costs.append((len(scratch.zstd.compress(sample, "generic")) / sample.nbytes, ZSTD))
    elif not is_float:
        costs.append((len(compress_lz4(sample)) / sample.nbytes, LZ4))
    costs.sort(key=lambda pair: pair[0])
    return constant + [codec for cost, codec in costs if cost < 1 - 1 / _SAVING_PART]


def _planes_cost(brief: Brief) -> float:
    """Return the estimated share of the plain bytes that coded planes take."""
    bits = [8.0 if entropy > ENTROPY_MAX else entropy + _CODER_LOSS for entropy in brief.entropies]
    return sum(bits) / (8 * brief.width)
