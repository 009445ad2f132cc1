"""Shared by all cases: command-line options, the saved state, and the usable tools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import histories, machine, other_tools, training
from bench.measure import Participant, Result, interleave, log


@dataclass
class Bench:
    """Command-line options, and the state that all cases share."""

    folder: Path
    cache: Path
    nbytes: int
    rounds: int
    is_small: bool
    count: int
    tools: list[str] | None

    @cached_property
    def donors(self) -> histories.Donors:
        """The source of the values in states."""
        return histories.synthetic_donors() if self.is_small else histories.trained_donors(self.cache)

    @cached_property
    def state(self) -> histories.State:
        """The state that is saved, of the requested size."""
        log(f"making a state of {self.nbytes / 1e9:.2f} GB")
        return histories.gpt_state(self.nbytes, donors=self.donors)

    @cached_property
    def training(self) -> training.Training:
        """The states of a trained run; of a tiny model with ``--small``."""
        if self.is_small:
            return training.ensure(self.folder, training.SMALL, log=log)
        return training.ensure(self.cache, log=log)

    @cached_property
    def other_tools(self) -> other_tools.AvailableTools:
        """The tools that work here."""
        trial = histories.gpt_state(8_000_000, donors=histories.synthetic_donors())
        return other_tools.find(trial, self.folder, self.tools)

    def result(self, case: str, unit: str, *, is_higher_better: bool) -> Result:
        """Make the result of a case, with its settings."""
        state_nbytes = histories.nbytes_of(self.state)
        tensor_count = sum(1 for _ in histories.tensors_of(self.state))
        values = "synthetic" if self.is_small else "trained"
        setting = {"state_nbytes": state_nbytes, "tensors": tensor_count, "rounds": self.rounds, "values": values}
        return Result(case, unit, is_higher_better, setting=setting)

    @cached_property
    def has_ckstore(self) -> str | None:
        """Why ckstore cannot be used, or None."""
        try:
            open_store(self.folder / "trial-ckstore", "none").close()
        except Exception as error:
            # The other tools can be measured even if ckstore does not work.
            return f"{type(error).__name__}: {error}"
        finally:
            machine.remove_tree(self.folder / "trial-ckstore")
        return None


def open_store(folder: Path, compression: str = "fast", **options: Any) -> Any:
    """Open a store with this compression and these other policy fields."""
    import ckstore

    policy: Any = {"compression": compression, **options}
    return ckstore.open(str(folder), run="main", policy=ckstore.Policy(**policy))


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """Return a speed in 10^9 bytes per second."""
    return nbytes / 1e9 / seconds


def facts_of(receipt: Any) -> dict[str, object]:
    """Return the facts of a receipt for a record."""
    return {
        "bytes_state": receipt.bytes_state,
        "bytes_written": receipt.bytes_written,
        "chunks_new": receipt.chunks_new,
        "chunks_reused": receipt.chunks_reused,
        "chunks_delta": receipt.chunks_delta,
        "chunks_derived": receipt.chunks_derived,
        "stages": dict(receipt.seconds),
        "engine": str(receipt.engine),
    }


def with_ckstore(
    bench: Bench, result: Result, participants: dict[str, Participant], mine: dict[str, Participant]
) -> Result:
    """Run the rounds, ckstore last, and compare it with the other participants."""
    others = list(participants)
    if bench.has_ckstore is None:
        participants = participants | mine
    else:
        result.unusable["ckstore"] = bench.has_ckstore
    interleave(result, participants, bench.rounds)
    result.add_ratios(list(mine), others)
    return result
