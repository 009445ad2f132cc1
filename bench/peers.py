"""Other coders of tensors, each called as its users do, on one thread, with the settings that compress states best.

- *xor* forms encode the exclusive or with the base, the only delta that these tools, or scripts around them, offer.
- *BitX-like* is the method of ZipLLM (xor, byte split, zstd) in numpy and zstandard: compare its sizes, not its
  speed, because the original is written in Rust.
- blosc2 and pcodec also get ckstore's integer differences, which a user could build. The subtraction is done by
  numpy and is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench import entropy
from bench.coders import Base, Coder, Form, Words, as_words

NAMES = {2: ("bfloat16", "bf16"), 4: ("float32", "fp32")}


def _xored(encode: Callable[[Words], Any], decode: Callable[[Any], Any]) -> Form:
    """Return a form that codes the exclusive or with the base; its buffer is allocated in advance."""
    room: dict[int, Words] = {}

    def code(words: Words, base: Base) -> Any:
        if words.nbytes not in room:
            room[words.nbytes] = np.zeros_like(words)
        mixed = room[words.nbytes].view(words.dtype)
        np.bitwise_xor(words, base, out=mixed)
        return encode(mixed)

    def back(stored: Any, base: Base, destination: Words) -> Words:
        np.bitwise_xor(as_words(decode(stored), destination.dtype), base, out=destination)
        return destination

    return Form(code, back)


def _plain(encode: Callable[[Words], Any], decode: Callable[[Any], Any]) -> Form:
    return Form(lambda words, _: encode(words), lambda stored, _, __: decode(stored))


def zipnn() -> Coder:
    """ZipNN: byte groups, Huffman codes; on the tensor and on an exclusive or."""
    from zipnn import ZipNN

    tools = {width: ZipNN(input_format="byte", bytearray_dtype=names[0], threads=1) for width, names in NAMES.items()}

    def encode(words: Words) -> Any:
        # It reorders its input in place.
        return tools[words.itemsize].compress(words.view(np.uint8).data)

    def back(stored: Any, base: Base, destination: Words) -> Any:
        return tools[destination.itemsize].decompress(stored)

    def xor_back(stored: Any, base: Base, destination: Words) -> Any:
        np.bitwise_xor(as_words(back(stored, None, destination), destination.dtype), base, out=destination)
        return destination

    xor = _xored(encode, lambda stored: stored)
    return Coder(
        "zipnn",
        Form(lambda words, _: encode(words), back, np.ndarray.copy),
        Form(xor.encode, xor_back, xor.prepare),
    )


def z4ai() -> Coder:
    """z4ai: bit fields or byte planes, rANS and zstd; its own delta."""
    import z4ai as tool

    def encode(words: Words, base: Base) -> Any:
        name = NAMES[words.itemsize][1]
        if base is None:
            return tool.compress(words.view(np.uint8).data, dtype=name, threads=1)
        return tool.compress_delta(words.view(np.uint8).data, base.view(np.uint8).data, dtype=name, threads=1)

    return Coder(
        "z4ai",
        Form(lambda words, _: encode(words, None), lambda stored, _, __: tool.decompress(stored)),
        Form(encode, lambda stored, base, _: tool.decompress_delta(stored, base.view(np.uint8).data)),
    )


def bitx() -> Coder:
    """The exclusive or, its byte planes, zstd -3 on each."""
    import zstandard

    coder, decoder = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()

    def encode(words: Words) -> bytes:
        planes = np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T)
        return _joined([coder.compress(plane.data) for plane in planes])

    def decode(stored: bytes) -> Words:
        planes = [np.frombuffer(decoder.decompress(part), np.uint8) for part in _parted(stored)]
        return np.stack(planes, axis=1)

    return Coder("BitX-like", _plain(encode, decode), _xored(encode, decode))


def _joined(parts: list[bytes]) -> bytes:
    return b"".join([bytes([len(parts)]), *(len(part).to_bytes(8, "little") for part in parts), *parts])


def _parted(stored: bytes) -> list[memoryview]:
    count, view = stored[0], memoryview(stored)
    start, parts = 1 + 8 * count, []
    for index in range(count):
        nbytes = int.from_bytes(view[1 + 8 * index : 9 + 8 * index], "little")
        parts.append(view[start : start + nbytes])
        start += nbytes
    return parts


def _blosc(level: int) -> tuple[Callable[[Words], Any], Callable[[Any], Any]]:
    import blosc2 as tool

    def encode(words: Words) -> Any:
        setting = tool.CParams(
            codec=tool.Codec.ZSTD,
            clevel=level,
            typesize=words.itemsize,
            nthreads=1,
            filters=[tool.Filter.SHUFFLE],
            splitmode=tool.SplitMode.ALWAYS_SPLIT,
        )
        return tool.compress2(words, cparams=setting)

    return encode, lambda stored: tool.decompress2(stored, dparams=tool.DParams(nthreads=1))


def blosc2() -> Coder:
    """blosc2: shuffle and zstd -1, on the tensor and on an exclusive or."""
    encode, decode = _blosc(1)
    return Coder("blosc2", _plain(encode, decode), _xored(encode, decode))


def blosc2_differences() -> Coder:
    """blosc2 on integer differences."""
    encode, decode = _blosc(1)
    return Coder("blosc2 on differences", _plain(encode, decode), _subtracted(encode, decode), needs_base=True)


def _subtracted(encode: Callable[[Words], Any], decode: Callable[[Any], Any]) -> Form:
    """Return a form that codes differences of ordered float patterns, with the sign in the lowest bit."""

    def back(stored: Any, base: Base, destination: Words) -> Words:
        found = as_words(decode(stored), destination.dtype)
        one = destination.dtype.type(1)
        steps = (found >> one) ^ (destination.dtype.type(0) - (found & one))
        return entropy.out_of_order(steps + entropy.in_order(base))

    def code(words: Words, base: Base) -> Any:
        return encode(entropy.differences(words, base))

    return Form(code, back)


def openzl() -> Coder:
    """OpenZL: its float deconstruction with FSE; on an exclusive or, transposition with entropy coding."""
    import openzl.ext as tool

    graphs, nodes = tool.graphs, tool.nodes

    def built(make: Callable[[Any], Any]) -> Callable[[Words], bytes]:
        compressor = tool.Compressor()
        graph = make(compressor)
        compressor.set_parameter(tool.CParam.FormatVersion, tool.MAX_FORMAT_VERSION)
        compressor.select_starting_graph(graph)
        context = tool.CCtx()
        context.set_parameter(tool.CParam.StickyParameters, 1)
        context.set_parameter(tool.CParam.FormatVersion, tool.MAX_FORMAT_VERSION)
        context.ref_compressor(compressor)
        # The context does not keep a reference to its compressor.
        return lambda words, _kept=compressor: context.compress([tool.Input(tool.Type.Numeric, words)])

    def lanes(compressor: Any) -> Any:
        return nodes.TransposeSplit()(compressor, graphs.Entropy())

    by_width = {
        4: built(lambda made: nodes.Float32Deconstruct()(made, lanes(made), graphs.Fse())),
        2: built(lambda made: nodes.BFloat16Deconstruct()(made, graphs.Store(), graphs.Fse())),
    }
    transposed = built(lambda made: nodes.ConvertNumToStructLE()(made, lanes(made)))
    context = tool.DCtx()

    def decode(stored: bytes) -> Words:
        return context.decompress(stored)[0].content.as_nparray()

    return Coder("openzl", _plain(lambda words: by_width[words.itemsize](words), decode), _xored(transposed, decode))


def pcodec() -> Coder:
    """Pcodec at its default level: floats as such, bf16 as integers; integer differences."""
    from pcodec import ChunkConfig, DeltaSpec, standalone

    setting = ChunkConfig(compression_level=8, delta_spec=DeltaSpec.no_op())

    def encode(words: Words) -> bytes:
        return standalone.simple_compress(words.view(np.float32) if words.itemsize == 4 else words, setting)

    def encode_integers(words: Words) -> bytes:
        return standalone.simple_compress(words, setting)

    decode = standalone.simple_decompress
    return Coder("pcodec", _plain(encode, decode), _subtracted(encode_integers, decode))


def zstd(level: int) -> Coder:
    """Zstandard on plain bytes."""
    import zstandard

    coder, decoder = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return Coder(f"zstd -{level}", _plain(lambda words: coder.compress(words.view(np.uint8).data), decoder.decompress))


MAKERS: dict[str, Callable[[], Coder]] = {
    "zipnn": zipnn,
    "z4ai": z4ai,
    "BitX-like": bitx,
    "blosc2": blosc2,
    "blosc2 on differences": blosc2_differences,
    "openzl": openzl,
    "pcodec": pcodec,
    "zstd -1": lambda: zstd(1),
    "zstd -3": lambda: zstd(3),
}
