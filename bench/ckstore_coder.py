"""ckstore's own coder as a commit calls it, and memcpy as the upper limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.coders import CHUNK_NBYTES, Base, Coder, Form, Words


class Arena:
    """Memory for encoded bytes, filled sequentially like the write blocks of a commit."""

    def __init__(self, nbytes: int) -> None:
        # Twice the state, so that encoded bytes are not overwritten before they are decoded.
        self._memory = np.full(2 * nbytes + CHUNK_NBYTES, 1, np.uint8)
        self._position = 0

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes of the memory."""
        if self._position + nbytes > len(self._memory):
            self._position = 0
        begin = self._position
        self._position += nbytes
        return self._memory[begin : begin + nbytes].data


@dataclass(frozen=True)
class Frame:
    """One stored chunk."""

    steps: tuple[tuple[int, bytes], ...]
    payload: memoryview
    plain_nbytes: int


@dataclass(frozen=True)
class Frames:
    """The stored chunks of a tensor; their length includes headers."""

    chunks: list[Frame]

    def __len__(self) -> int:
        from ckstore.format.frame import FRAME_HEADER_NBYTES

        return sum(FRAME_HEADER_NBYTES + len(frame.payload) for frame in self.chunks)


def ckstore(arena: Arena) -> Coder:
    """Encode chunk by chunk into the arena, with one form for the whole tensor; decode into the destination."""
    from ckstore.codec import chunk_codec, kernels
    from ckstore.delta.cost_model import TIE_SHARE

    scratch = chunk_codec.Scratch(CHUNK_NBYTES)
    samples = [memoryview(bytearray(chunk_codec.SAMPLE_NBYTES)) for _ in range(2)]

    def is_delta_better(chunks: list[tuple[memoryview, memoryview]], width: int) -> bool:
        full = delta = 0.0
        for plain, base in chunks:
            new, old = samples[0], samples[1]
            new, old = new[: chunk_codec.sample_of(plain, width, new)], old[: chunk_codec.sample_of(base, width, old)]
            full += plain.nbytes * chunk_codec.estimate_full(new, width, True)
            delta += plain.nbytes * chunk_codec.estimate_delta(new, old, width, True)
        return delta < full * (1 - TIE_SHARE)

    def encode(words: Words, base: Base) -> Frames:
        width, plains = words.itemsize, _chunks(words)
        bases = _chunks(base) if base is not None else []
        if not (bases and is_delta_better(list(zip(plains, bases, strict=True)), width)):
            bases = []
        frames: list[Frame] = []
        for index, plain in enumerate(plains):
            coded = None
            if bases:
                coded = chunk_codec.encode_delta(
                    plain, bases[index], width=width, is_float=True, compression="fast", scratch=scratch
                )
            if coded is None:
                coded = chunk_codec.encode(plain, width=width, is_float=True, compression="fast", scratch=scratch)
            room, position = arena.take(coded.nbytes), 0
            for part in coded.parts:
                kernels.copy_bytes(part, room[position : position + part.nbytes])
                position += part.nbytes
            frames.append(Frame(coded.steps, room, plain.nbytes))
        return Frames(frames)

    def decode(stored: Frames, base: Base, destination: Words) -> Words:
        width, places = destination.itemsize, _chunks(destination)
        bases = _chunks(base) if base is not None else []
        for index, (frame, place) in enumerate(zip(stored.chunks, places, strict=True)):
            needs_base = chunk_codec.base_nbytes(frame.steps, frame.plain_nbytes)
            chunk_codec.decode(
                frame.payload,
                frame.steps,
                width=width,
                destination=place,
                scratch=scratch,
                base=bases[index] if needs_base else None,
            )
        return destination

    form = Form(encode, decode)
    return Coder("ckstore", form, form, chooses=True)


def _chunks(words: Words) -> list[memoryview]:
    """Cut a tensor as a commit does: 4 MiB, and 2 MiB for elements of two bytes."""
    view = words.view(np.uint8).data
    step = CHUNK_NBYTES // 2 if words.itemsize == 2 else CHUNK_NBYTES
    return [view[begin : begin + step] for begin in range(0, len(view), step)]


def memcpy(arena: Arena) -> Coder:
    """Copy into the arena, and back."""

    def encode(words: Words, base: Base) -> memoryview:
        room = arena.take(words.nbytes)
        np.copyto(np.frombuffer(room, np.uint8), words.view(np.uint8))
        return room

    def decode(stored: memoryview, base: Base, destination: Words) -> Words:
        np.copyto(destination.view(np.uint8), np.frombuffer(stored, np.uint8))
        return destination

    return Coder("memcpy", Form(encode, decode))
