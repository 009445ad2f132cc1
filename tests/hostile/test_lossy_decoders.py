"""Protects readers from hostile lossy payloads: each mutation decodes or is refused, 180,000 in a deep run.

These tests check memory, exceptions, and that a refused payload leaves its base unchanged. Wrong values of a payload
that decodes are detected by its BLAKE3, which is tested elsewhere.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from bench import excp

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import CodecStep
from ckstore.codec.kernels import reference
from ckstore.config import FirstMomentSettings, SecondMomentSettings, WeightSettings
from ckstore.errors import CorruptError, UnsupportedError
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk

GUARD = b"\x5a" * 64
HEAD_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Seed:
    """A valid lossy frame from which hostile ones are made."""

    name: str
    steps: tuple[CodecStep, ...]
    width: int
    payload: bytes
    base: bytes
    nbytes: int


def seeds(scratch: chunk_codec.Scratch, rows: int) -> list[Seed]:
    rng = np.random.default_rng(1)
    spread = np.exp2(rng.normal(0, 1.5, (rows, 1)) + rng.normal(0, 1.0, (1, 100)))
    base = rng.standard_normal((rows, 100)).astype(np.float32)
    change = (rng.standard_t(4, (rows, 100)) * spread * 1e-3).astype(np.float32)
    second = ((spread * 1e-3) ** 2 * np.exp2(rng.normal(0, 1, (rows, 100)))).astype(np.float32)
    change.reshape(-1)[:: rows * 10] += 5
    wide = [memoryview(np.ascontiguousarray(side).tobytes()) for side in (base + change, base, change, second)]
    weight, before, first, moment = wide
    half_weight, half_before = (
        memoryview((np.frombuffer(side, "<u4") >> 16).astype("<u2").tobytes()) for side in wide[:2]
    )
    room, shape = memoryview(bytearray(weight.nbytes)), ChunkShape("float32", 100, 37)
    how = {"scratch": scratch, "reconstruction": room}
    found = []

    def add(name: str, made: QuantizedChunk | None, under: memoryview, nbytes: int) -> None:
        assert made is not None, name
        payload = b"".join(made.encoded.parts)
        found.append(Seed(name, made.encoded.steps, made.encoded.width, payload, bytes(under), nbytes))

    chunky = WeightSettings(step=1.0, scale="chunk", levels_max=9)
    add("grid", lossy_forms.encode_weights(weight, before, shape, chunky, **how), before, weight.nbytes)
    by_row = WeightSettings(step=0.5, levels_max=20)
    add("grid by rows", lossy_forms.encode_weights(weight, before, shape, by_row, **how), before, weight.nbytes)
    pruned = excp.encode_weights(weight, before, shape, excp.Pruning(1e9), **how)
    add("pruned", pruned, before, weight.nbytes)
    half = {"scratch": scratch, "reconstruction": room[: half_weight.nbytes]}
    bf16 = lossy_forms.encode_weights(half_weight, half_before, ChunkShape("bfloat16", 100), by_row, **half)
    add("bf16", bf16, half_before, half_weight.nbytes)
    for form in ("rank1", "log"):
        made = lossy_forms.encode_second_moment(moment, shape, SecondMomentSettings(form), **how)
        add(form, made, memoryview(b""), moment.nbytes)
    made = lossy_forms.encode_first_moment(first, moment, moment, shape, FirstMomentSettings(step=0.5), **how)
    add("moment1", made, moment, first.nbytes)
    return found


def mutated(seed: Seed, rng: np.random.Generator) -> Seed:
    """Change the payload, mostly its lengths and tables; sometimes length, kind or base."""
    payload, nbytes, steps, width, base = bytearray(seed.payload), seed.nbytes, seed.steps, seed.width, seed.base
    kind = int(rng.integers(12))
    if kind < 7:
        reach = min(len(payload), (HEAD_NBYTES, 250, len(payload))[kind % 3])
        for place in rng.integers(0, reach, rng.integers(1, 4)):
            payload[place] = rng.integers(256) if kind % 2 else payload[place] ^ (1 << rng.integers(8))
    elif kind == 7:
        struct.pack_into(
            "<I", payload, int(rng.integers(0, 60)), int(rng.choice([0, 1, 15, 16, 255, 65_536, 2**32 - 1]))
        )
    elif kind == 8:
        del payload[rng.integers(len(payload) + 1) :]
    elif kind == 9:
        payload[rng.integers(len(payload) + 1) :] = rng.bytes(int(rng.integers(0, 300)))
    elif kind == 10:
        nbytes = max(0, nbytes + int(rng.integers(-40, 40)))
        base = base[:nbytes] if base else base
    else:
        chosen = (int(rng.integers(6, 12)), bytes([int(rng.integers(4))]))
        steps, width = (chosen,), int(rng.choice([2, 4, 8]))
    return Seed(seed.name, steps, width, bytes(payload), base, nbytes)


def survives(hostile: Seed, scratch: chunk_codec.Scratch) -> str:
    """Decode onto the base, and return the outcome."""
    inside = hostile.base if hostile.base else bytes(hostile.nbytes)
    room = bytearray(GUARD + inside[: hostile.nbytes].ljust(hostile.nbytes, b"\0") + GUARD)
    destination = memoryview(room)[len(GUARD) : len(room) - len(GUARD)]
    before = bytes(destination)
    try:
        chunk_codec.decode(
            memoryview(hostile.payload),
            hostile.steps,
            width=hostile.width,
            destination=destination,
            scratch=scratch,
            base=destination if hostile.base else None,
        )
        outcome = "decoded"
    except CorruptError:
        outcome = "corrupt"
    except UnsupportedError:
        outcome = "unsupported"
    assert room.startswith(GUARD)
    assert room.endswith(GUARD)
    if outcome != "decoded" and hostile.steps[0][0] in (7, 8, 9, 10):
        assert destination == before, "a base was harmed"
    return outcome


def attack(count: int, rows: int, seed: int) -> Counter[str]:
    scratch, rng = chunk_codec.Scratch(1 << 17), np.random.default_rng(seed)
    valid, outcomes = seeds(scratch, rows), Counter[str]()
    for number in range(count):
        outcomes[survives(mutated(valid[number % len(valid)], rng), scratch)] += 1
        if number % 2000 == 0:
            assert all(survives(whole, scratch) == "decoded" for whole in valid)
    return outcomes


@pytest.mark.deep
@pytest.mark.parametrize(("rows", "total"), [(20, 150_000), (250, 30_000)])
def test_hostile_payloads_stay_within_destination(rows, total, sample, note) -> None:
    count = sample.count(total, parts=40)
    if not sample.is_whole and kernels.IMPLEMENTATION["finish_values"] != "native":
        # The numpy loops take about ten times as long.
        count //= 10
    outcomes = attack(count, rows, sample.seed(rows))
    note(f"fuzz: {sum(outcomes.values())} lossy payloads of {rows} rows, {dict(sorted(outcomes.items()))}")
    assert set(outcomes) == {"decoded", "corrupt", "unsupported"}
    assert not sample.is_whole or sum(outcomes.values()) == total


def test_numpy_decoders_stay_within_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in kernels.IMPLEMENTATION:
        monkeypatch.setattr(kernels, loop, getattr(reference, loop))
    assert set(attack(300, 20, 20)) == {"decoded", "corrupt", "unsupported"}
