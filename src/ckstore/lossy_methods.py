"""What was done to a chunk, in a word and in numbers: as it came out, not as it was asked for.

A chunk that few directions do not describe falls back to a grid, factors of too few rows to logarithms, and some
chunks of a tensor may be exact. Of a tensor whose chunks differ, every word is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields

from ckstore import lossy_directions, lossy_forms
from ckstore.codec.base import CodecStep
from ckstore.lossy import Settings
from ckstore.quant.geometry import ChunkShape, Grid
from ckstore.quant.second import has_factors
from ckstore.quant.settings import FirstMomentSettings, SecondMomentSettings

EXACT_METHOD, ROUNDED_METHOD = "exact", "rounded"


def method_of(steps: Sequence[CodecStep], settings: Settings, shape: ChunkShape, plain_nbytes: int) -> str:
    """Return the word for how a chunk was quantized.

    Args:
        steps: Of its frame.
        settings: What was asked for.
        shape: What the chunk is of its tensor.
        plain_nbytes: Its length.
    """
    taken = {step for step, _ in steps}
    if taken.intersection(lossy_directions.STEPS):
        return "outer"
    if not taken.intersection(lossy_forms.LOSSY_STEPS):
        return "dropped"
    if isinstance(settings, SecondMomentSettings):
        grid = Grid(plain_nbytes // shape.width, shape.row_nelements, shape.phase)
        return "rank1" if settings.form == "rank1" and has_factors(grid) else "log"
    return settings.form if isinstance(settings, FirstMomentSettings) else "grid"


def numbers_of(settings: Settings, methods: Collection[str]) -> dict[str, float]:
    """Return the numbers among the settings; those of outer products where some were taken."""
    facts = {field.name: getattr(settings, field.name) for field in fields(settings)}
    low_rank = facts.get("low_rank")
    if low_rank is not None and "outer" in methods:
        facts |= {f"outer_{field.name}": getattr(low_rank, field.name) for field in fields(low_rank)}
    return {name: float(value) for name, value in facts.items() if isinstance(value, int | float)}


def word_of(methods: Collection[str]) -> str:
    """Return the words for the chunks of a tensor in one."""
    return ".".join(sorted(methods))
