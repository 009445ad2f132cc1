"""Protects the kernels: every native implementation equals on_numpy, bit for bit.

Without the extension the native part is skipped. The numpy part is compared with a definition for single Python
integers, written here.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from ckstore.codec import kernels
from ckstore.codec.kernels import reference
from support.kernel_implementations import both

WIDTHS = (1, 2, 4, 8)
COUNTS = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 8191, 70001)


def pattern(name: str, nbytes: int) -> np.ndarray:
    if name == "random":
        return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    if name == "ones":
        return np.full(nbytes, 0xFF, np.uint8)
    if name == "edges":
        # Sign bits, NaN, infinities and denormals of every float width.
        edges = b"".join(
            np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(kind).tiny / 2], kind).tobytes()
            for kind in (np.float16, np.float32, np.float64)
        )
        return np.resize(np.frombuffer(edges, np.uint8), nbytes)
    return np.zeros(nbytes, np.uint8)


def planes_by_definition(source: bytes, width: int, rotate: bool) -> bytes:
    bits = 8 * width
    words = [int.from_bytes(source[i : i + width], "little") for i in range(0, len(source), width)]
    if rotate:
        words = [((word << 1) | (word >> (bits - 1))) & ((1 << bits) - 1) for word in words]
    return b"".join(bytes((word >> (8 * plane)) & 0xFF for word in words) for plane in range(width))


def cut(planes: np.ndarray, width: int) -> list[np.ndarray]:
    return list(planes.reshape(width, -1))


@both
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_split_matches_the_definition(loops: ModuleType, width: int, rotate: bool) -> None:
    for name in ("random", "edges", "ones", "zeros"):
        for count in COUNTS[:-1]:
            source = pattern(name, count * width)
            planes = np.full(source.size, 0xAA, np.uint8)
            loops.split_planes(source, planes, width, rotate)
            assert planes.tobytes() == planes_by_definition(source.tobytes(), width, rotate), (name, count)


@both
@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_merge_inverts_the_numpy_split(loops: ModuleType, width: int, rotate: bool) -> None:
    for name in ("random", "edges"):
        for count in COUNTS:
            source = pattern(name, count * width)
            planes = np.empty(source.size, np.uint8)
            reference.split_planes(source.data, planes.data, width, rotate)
            merged = np.full(source.size, 0xAA, np.uint8)
            loops.merge_planes(cut(planes, width), merged, width, rotate)
            assert merged.tobytes() == source.tobytes(), (name, count)


@both
@pytest.mark.parametrize("shift", [1, 3, 7])
def test_unaligned_buffers_give_the_same(loops: ModuleType, shift: int) -> None:
    for width in WIDTHS:
        nbytes = 1003 * width
        source = pattern("random", nbytes + 16)[shift : shift + nbytes]
        room = np.full(nbytes + 16, 0x5A, np.uint8)
        loops.split_planes(source, room[shift : shift + nbytes], width, True)
        assert room[shift : shift + nbytes].tobytes() == planes_by_definition(source.tobytes(), width, True)
        back = np.full(nbytes + 16, 0x5A, np.uint8)
        loops.merge_planes(cut(room[shift : shift + nbytes], width), back[shift : shift + nbytes], width, True)
        assert back[shift : shift + nbytes].tobytes() == source.tobytes()
        for untouched in (room, back):
            assert (untouched[:shift] == 0x5A).all()
            assert (untouched[shift + nbytes :] == 0x5A).all()


@both
def test_every_contiguous_buffer_is_accepted(loops: ModuleType) -> None:
    content = bytes(range(256)) * 4
    mapped = mmap.mmap(-1, len(content))
    for source in (content, bytearray(content), memoryview(content), np.frombuffer(content, np.float32)):
        loops.copy_bytes(source, mapped)
        assert mapped[:] == content
        assert loops.equal_bytes(source, mapped)
    mapped.close()


@both
def test_copy_and_equal_agree_on_every_length(loops: ModuleType) -> None:
    for nbytes in (0, 1, 7, 64, 4097, 200_001):
        source = pattern("random", nbytes)
        target = np.zeros(nbytes, np.uint8)
        loops.copy_bytes(source, target)
        assert target.tobytes() == source.tobytes()
        assert loops.equal_bytes(source, target) is True
        if nbytes:
            target[-1] ^= 1
            assert loops.equal_bytes(source, target) is False
            assert loops.equal_bytes(source, target[:-1]) is False


@both
def test_constant_means_all_bytes_alike(loops: ModuleType) -> None:
    for nbytes in (0, 1, 2, 65, 70_000):
        source = np.full(nbytes, 7, np.uint8)
        assert loops.is_constant(source) is True
        for place in {0, nbytes // 2, nbytes - 1} if nbytes > 1 else ():
            source[place] = 8
            assert loops.is_constant(source) is False
            source[place] = 7


@both
def test_histogram_counts_every_byte(loops: ModuleType) -> None:
    for name in ("random", "ones", "edges"):
        for nbytes in (0, 1, 7, 8, 9, 70_003):
            source = pattern(name, nbytes)
            counts = np.full(256, 99, np.uint32)
            loops.histogram(source, counts)
            assert (counts == np.bincount(source, minlength=256)).all()


@both
def test_wrong_arguments_raise_value_error(loops: ModuleType) -> None:
    eight, nine = np.zeros(8, np.uint8), np.zeros(9, np.uint8)
    halves = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]
    spread = np.zeros(16, np.uint8)[::2]
    frozen = bytes(8)
    wrong: list[Callable[[], object]] = [
        lambda: loops.split_planes(eight, nine, 2, False),
        lambda: loops.split_planes(nine, nine.copy(), 2, False),
        lambda: loops.split_planes(eight, eight.copy(), 3, False),
        lambda: loops.split_planes(eight, eight.copy(), 0, False),
        lambda: loops.split_planes(spread, eight, 2, False),
        lambda: loops.split_planes(eight, frozen, 2, False),
        lambda: loops.merge_planes(halves[:1], eight, 2, False),
        lambda: loops.merge_planes([*halves, halves[0]], eight, 2, False),
        lambda: loops.merge_planes([halves[0], eight], eight.copy(), 2, False),
        lambda: loops.merge_planes(halves, frozen, 2, False),
        lambda: loops.merge_planes([], nine, 16, False),
        lambda: loops.copy_bytes(eight, nine),
        lambda: loops.copy_bytes(eight, frozen),
        lambda: loops.copy_bytes(eight, spread),
        lambda: loops.is_constant(spread),
        lambda: loops.histogram(eight, np.zeros(255, np.uint32)),
        lambda: loops.histogram(eight, np.zeros(1025, np.uint8)[1:]),
    ]
    for index, call in enumerate(wrong):
        with pytest.raises(ValueError, match=r"buffer|width|length|plane|aligned"):
            pytest.fail(f"call {index} returned {call()!r}")


def test_kernels_report_the_chosen_implementation() -> None:
    names = {name for name in kernels.__all__ if name.islower()}
    assert set(kernels.IMPLEMENTATION) == names
    for name, chosen in kernels.IMPLEMENTATION.items():
        assert (getattr(kernels, name) is getattr(reference, name)) == (chosen == "numpy")


def test_native_kernels_release_the_gil() -> None:
    on_native = pytest.importorskip("ckstore._native")
    source = np.zeros(256 << 20, np.uint8)

    def ticks_of_a_call() -> int:
        ticks, ended = 0, threading.Event()

        def count_constant() -> None:
            on_native.histogram(source, np.zeros(256, np.uint32))
            ended.set()

        thread = threading.Thread(target=count_constant)
        thread.start()
        while not ended.wait(0.001):
            ticks += 1
        thread.join()
        return ticks

    # If the call held the GIL, there would be one tick for any length of call. On a busy machine that may happen too.
    assert any(ticks_of_a_call() > 5 for _ in range(40))
