"""Lossless coding of one chunk, and decoding of one stored frame.

``chunk_codec`` is the entry. ``encode`` codes a chunk by itself, ``encode_delta`` against a base of the same length,
``encode_rounded`` as the bf16 or fp16 rounding of an fp32 base; ``decode`` reverses all of them:

    scratch = Scratch(chunk_nbytes_max)                       # one per thread
    encoded = encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    decode(payload, encoded.steps, width=4, destination=plain_again, scratch=scratch)

``frame_decoder`` decodes a whole frame, header included, and proves that the result is the chunk that was asked for.
Below them: ``planes`` (byte planes and their entropy coding), ``byte_codecs`` (what every codec provides; zstd, lz4 and
constant) and ``kernels`` (the loops, in C++ and in numpy).

Not here: which base a chunk gets (``delta``, ``commit``), quantization (``quant``), and the layout of packs
(``format``).
"""

from __future__ import annotations
