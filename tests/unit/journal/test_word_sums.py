"""Protects word sums: torch and numpy agree on every length, and every changed bit changes the sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckstore.journal import word_sums
from ckstore.journal.word_sums import word_sum, word_sum_of_tensor


def by_definition(content):
    """Return the word sum as docs/FORMAT.md defines it, with Python's integers."""
    words = [int.from_bytes(content[begin : begin + 8], "little") for begin in range(0, len(content), 8)]
    total = len(content)
    for number, word in enumerate(words, 1):
        mixed = (word + number * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        total += mixed ^ mixed >> 31
    return total % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 24, 31, 1000, 4096])
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_all_forms_agree(monkeypatch, nbytes, piece):
    monkeypatch.setattr(word_sums, "_PIECE_COUNT", piece)
    content = np.random.default_rng(nbytes).bytes(nbytes)
    wanted = by_definition(content)
    assert word_sum(memoryview(content)) == wanted
    memory = torch.frombuffer(bytearray(b"?" + content), dtype=torch.uint8)[1:] if nbytes else torch.empty(0).byte()
    before = memory.clone()
    assert int(word_sum_of_tensor(memory)) % 2**64 == wanted
    assert torch.equal(memory, before), "the memory itself is not changed"


def test_known_sums():
    """They are on disk. The second is the first output of splitmix64 from the state 0, and the length."""
    assert word_sum(memoryview(b"")) == 0
    assert word_sum(memoryview(bytes(8))) == 0xE220A8397B1DCDAF + 8


def test_every_changed_bit_and_exchange_changes_the_sum():
    content = np.random.default_rng(1).integers(0, 256, 40, np.uint8)
    sums = {word_sum(content)}
    for bit in range(8 * content.size):
        changed = content.copy()
        changed[bit // 8] ^= 1 << bit % 8
        sums.add(word_sum(changed))
    sums.add(word_sum(np.roll(content, 8)))
    sums.add(word_sum(np.append(content, np.uint8(0))))
    assert len(sums) == 8 * content.size + 3
