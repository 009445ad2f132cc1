"""The checksums of a state's storages: xxh3-64 in host memory, and word sums where a device has the memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckstore.concurrency import map_in_threads
from ckstore.config import MIB
from ckstore.format.wire import xxh3_64
from ckstore.journal.word_sums import word_sum, word_sums_of_tensors
from ckstore.state.capture import Captured
from ckstore.state.memory import Spans, readers_of, shapes_of, starts_of
from ckstore.state.tensors import OnDevice

if TYPE_CHECKING:
    import torch

_BATCH_NBYTES = 4 * MIB
"""Bytes of the storages that are hashed in one call on a thread."""


def device_indices(captured: Captured) -> frozenset[int]:
    """Return the storages whose word sums their devices can compute: those of torch that are not in host memory."""
    if isinstance(captured.storages, Spans) and captured.storages.are_host:
        return frozenset()
    readers = readers_of(captured.storages)
    return frozenset(index for index, reader in enumerate(readers) if isinstance(reader, OnDevice))


def checksums_of(
    captured: Captured,
    only: Sequence[int] | None = None,
    *,
    thread_count: int,
    word_sums: Collection[int] | None = None,
) -> list[int]:
    """Return the checksum of each storage. Hashing releases the GIL.

    Args:
        captured: The state.
        only: Indices of the storages; None: all.
        thread_count: Threads that hash.
        word_sums: Indices of the storages whose word sums are wanted; the others get their xxh3-64. None: as
            ``device_indices``.
    """
    shapes = shapes_of(captured.storages)
    by_words = device_indices(captured) if word_sums is None else word_sums
    chosen = range(len(shapes)) if only is None else only
    found = _word_sums_of(captured, [index for index in chosen if index in by_words]) if by_words else {}
    batches: list[list[int]] = [[]]
    filled = 0
    for index in chosen:
        if index in by_words:
            continue
        if filled and filled + shapes[index].nbytes > _BATCH_NBYTES:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += shapes[index].nbytes

    def hashed(batch: list[int]) -> list[tuple[int, int]]:
        return [(index, xxh3_64(captured.storages[index].read(0, shapes[index].nbytes))) for index in batch]

    if len(batches) == 1 or thread_count == 1:
        found |= itertools.chain.from_iterable(map(hashed, batches))
    else:
        results = map_in_threads(hashed, batches, count_max=thread_count, name="ckstore-journal")
        found |= itertools.chain.from_iterable(results)
    return [found[index] for index in chosen]


def _word_sums_of(captured: Captured, indices: Sequence[int]) -> dict[int, int]:
    """Return word sums. A device computes those of its memory, and one copy from it brings them all."""
    storages, readers = captured.storages, readers_of(captured.storages)
    starts, shapes = starts_of(storages), shapes_of(storages)
    found: dict[int, int] = {}
    on_device: dict[int, torch.Tensor] = {}
    for index in indices:
        reader, begin, nbytes = readers[index], starts[index], shapes[index].nbytes
        if isinstance(reader, OnDevice):
            on_device[index] = reader.on_device(begin, begin + nbytes)
        else:
            found[index] = word_sum(storages[index].read(0, nbytes))
    return found | dict(zip(on_device, word_sums_of_tensors([*on_device.values()]), strict=True))
