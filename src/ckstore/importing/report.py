"""What an import found, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ImportEntry:
    """One foreign checkpoint.

    Attributes:
        name: Its file or folder.
        step: The step it was, or would be, committed under.
        kinds: What it is made of: ``torch``, ``safetensors``, ``dcp``.
        action: ``"import"``; ``"skip"``: the run has it already, or gets it from another file; ``"leave out"``: its
            step is taken by other content.
        reason: Why it is skipped or left out, or where its step was found.
        nbytes: Bytes of its files.
        seq: Its number in the run; None where it was not imported yet.
        bytes_state: Plain bytes of its tensors; None as above.
        bytes_written: Bytes that it added to the store; None as above.
        metrics: What was found of metrics.
        left_out: Dotted path of a leaf -> why it is left out.
        without_state: File -> why it is left out; it holds settings, and no state.
        warnings: What its commit met, and what became of objects in it.
        time_ns: When the last of its files was modified: the time of the checkpoint.
        is_compared: False where it is skipped although the run's entry of this step has another time, so that it may be
            of other content.
    """

    name: str
    step: int
    kinds: tuple[str, ...]
    action: Literal["import", "skip", "leave out"]
    reason: str
    nbytes: int
    seq: int | None = None
    bytes_state: int | None = None
    bytes_written: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    without_state: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    time_ns: int = 0
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import planned or did, in the order of the steps.

    Attributes:
        source: The file or folder.
        run: The run it went into.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint found.
        left_out: Path below the source -> why it is in no checkpoint, although it may hold a state.
        warnings: What the user should know, in whole sentences.
    """

    source: str
    run: str
    is_dry_run: bool
    entries: tuple[ImportEntry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether anything that may hold a state was left out, for whatever reason."""
        return bool(self.left_out) or any(
            entry.left_out or entry.action == "leave out" or not entry.is_compared for entry in self.entries
        )

    @property
    def stored(self) -> tuple[ImportEntry, ...]:
        """Those that are in the run, by this import or an earlier one."""
        return tuple(entry for entry in self.entries if entry.bytes_written is not None)

    @property
    def bytes_before(self) -> int:
        """Bytes of the files of what is in the run."""
        return sum(entry.nbytes for entry in self.stored)

    @property
    def bytes_stored(self) -> int:
        """Bytes that it takes in the store."""
        return sum(entry.bytes_written or 0 for entry in self.stored)

    @property
    def ratio(self) -> float | None:
        """How many times smaller the history became; None where nothing was stored."""
        return self.bytes_before / self.bytes_stored if self.bytes_stored else None
