"""What the cases share: what the command line asked for, the state that is saved, the tools that work here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import histories, machine, rivals, training
from bench.measure import Participant, Result, interleave, tell


@dataclass
class Bench:
    """What the command line asked for, and the state that all cases share."""

    folder: Path
    cache: Path
    nbytes: int
    rounds: int
    is_small: bool
    count: int
    tools: list[str] | None

    @cached_property
    def donors(self) -> histories.Donors:
        """The values that states are made of."""
        return histories.synthetic_donors() if self.is_small else histories.trained_donors(self.cache)

    @cached_property
    def state(self) -> histories.State:
        """The state that is saved, of the asked size."""
        tell(f"making a state of {self.nbytes / 1e9:.2f} GB")
        return histories.gpt_state(self.nbytes, donors=self.donors)

    @cached_property
    def training(self) -> training.Training:
        """The states of a run that was really trained; of a tiny model where all is small."""
        if self.is_small:
            return training.ensure(self.folder, training.SMALL, tell=tell)
        return training.ensure(self.cache, tell=tell)

    @cached_property
    def rivals(self) -> rivals.Rivals:
        """The tools that work here."""
        trial = histories.gpt_state(8_000_000, donors=histories.synthetic_donors())
        return rivals.find(trial, self.folder, self.tools)

    def result(self, case: str, unit: str, *, is_higher_better: bool) -> Result:
        """Start the result of a case with the setting it runs under."""
        state_nbytes = histories.nbytes_of(self.state)
        tensor_count = sum(1 for _ in histories.tensors_of(self.state))
        values = "synthetic" if self.is_small else "trained"
        setting = {"state_nbytes": state_nbytes, "tensors": tensor_count, "rounds": self.rounds, "values": values}
        return Result(case, unit, is_higher_better, setting=setting)

    @cached_property
    def has_ckstore(self) -> str | None:
        """Why ckstore cannot take part, or None."""
        try:
            open_store(self.folder / "trial-ckstore", "none").close()
        except Exception as error:
            # The bench of the others is worth having while the store is being built.
            return f"{type(error).__name__}: {error}"
        finally:
            machine.remove_tree(self.folder / "trial-ckstore")
        return None


def open_store(folder: Path, compression: str = "fast", **options: Any) -> Any:
    """Open a store with a policy that differs from the default in its compression and what is named."""
    import ckstore

    policy: Any = {"compression": compression, **options}
    return ckstore.open(str(folder), run="main", policy=ckstore.Policy(**policy))


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """Return a speed in 10^9 bytes a second."""
    return nbytes / 1e9 / seconds


def facts_of(receipt: Any) -> dict[str, object]:
    """Return what a record keeps of a receipt."""
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
    """Run the rounds with ckstore last, and compare it with everybody else."""
    others = list(participants)
    if bench.has_ckstore is None:
        participants = participants | mine
    else:
        result.unusable["ckstore"] = bench.has_ckstore
    interleave(result, participants, bench.rounds)
    result.add_ratios(list(mine), others)
    return result
