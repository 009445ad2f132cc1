"""The size of a history in the files of other tools: torch.save with zstd, and each peer's coder on every tensor.

Only sizes are measured, so that all cores are used. Every tensor is encoded against the previous checkpoint or alone,
whichever ideal coding would make smaller. With these tools the user has to make this choice; here it is free.
"""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
import zstandard

from bench import coders, histories, peers
from bench.measure import log
from bench.training import Arrays

LoadArrays = Callable[[], Arrays]
NOT_ALONE = ("zstd -1", "zstd -3")
"""These encode whole files as torch.save writes them."""


@dataclass
class PeerFileSizes:
    """The file sizes of every tool, and the tools that cannot be used.

    Attributes:
        best: Bytes of each checkpoint by tool, with chains of any length.
        bounded: The same with keyframes where ckstore made some, so that restores read about as much.
        plain: Bytes of each state.
        unusable: Reason by tool.
    """

    plain: list[int] = field(default_factory=list)
    best: dict[str, list[int]] = field(default_factory=dict)
    bounded: dict[str, list[int]] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)


def measure(loaders: Sequence[LoadArrays], keyframes: Collection[int], names: list[str] | None = None) -> PeerFileSizes:
    """Encode every checkpoint with every tool; those in ``keyframes`` also without a base."""
    usable, unusable = _usable(names)
    measured = PeerFileSizes(unusable=unusable)
    # Threads do not survive a fork, and torch has started some.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        jobs = []
        for number, load in enumerate(loaders):
            load_base = loaders[number - 1] if number else None
            jobs.append(pool.submit(_checkpoint, load, load_base, usable, is_keyframe=number in keyframes))
        for number, job in enumerate(jobs):
            plain_nbytes, sizes = job.result()
            measured.plain.append(plain_nbytes)
            for name, (best, bounded) in sizes.items():
                measured.best.setdefault(name, []).append(best)
                measured.bounded.setdefault(name, []).append(bounded)
            log(f"  peers' files: checkpoint {number + 1} of {len(jobs)}")
    return measured


def _usable(names: list[str] | None) -> tuple[list[str], dict[str, str]]:
    usable: list[str] = []
    unusable: dict[str, str] = {}
    for name, make in peers.MAKERS.items():
        if name in NOT_ALONE or (names is not None and name not in names):
            continue
        try:
            make()
        except Exception as error:
            # Any failure of a tool becomes a line in the table.
            unusable[name] = f"{type(error).__name__}: {error}"
        else:
            usable.append(name)
    return usable, unusable


def _checkpoint(
    load: LoadArrays, load_base: LoadArrays | None, names: list[str], *, is_keyframe: bool
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the plain bytes of a checkpoint, and its size with each tool: at best, and with bounded chains."""
    arrays = load()
    pieces = coders.pieces_of(arrays, None if load_base is None else load_base())
    stream = io.BytesIO()
    torch.save(histories.state_of(arrays, 0), stream)
    whole = len(zstandard.ZstdCompressor(level=3).compress(stream.getbuffer()))
    bounds = round(sum(piece.bound for piece in pieces)), round(sum(piece.bound_full for piece in pieces))
    found = {
        "torch.save + zstd -3": (whole, whole),
        "bound (order-0, planes)": (bounds[0], bounds[is_keyframe]),
    }
    for name in names:
        coder = peers.MAKERS[name]()
        best = bounded = 0
        for piece in pieces:
            form = coder.form_for(piece)
            nbytes = _coded_nbytes(form, piece)
            best += nbytes
            if is_keyframe and coder.full is not None and form is not coder.full:
                nbytes = _coded_nbytes(coder.full, piece)
            bounded += nbytes
        found[name] = best, bounded
    return sum(values.nbytes for values in arrays.values()), found


def _coded_nbytes(form: coders.Form, piece: coders.Piece) -> int:
    return len(form.encode(form.prepare(piece.words), piece.base))
