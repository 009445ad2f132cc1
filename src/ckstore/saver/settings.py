"""How commits in the background behave; fields that a policy may carry, each with a default that is safe."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal

from ckstore.errors import UsageError

OnBusy = Literal["wait", "skip", "replace"]

THREADS_MAX = 8
"""More threads than this gain nothing: a few fill the memory's bandwidth."""


@dataclass(frozen=True, slots=True)
class SaverSettings:
    """How one commit goes into the background.

    Args:
        on_busy: What a commit does while an earlier one is still being written: ``"wait"`` for it; ``"skip"``, which
            stores nothing and says so; ``"replace"`` a staged one that still waits for its turn, for which there is
            room for two states.
        staging_threads: Threads that copy the state, the caller's included; None: as many as reach the memory's
            bandwidth.
        saver_nice: Added to the niceness of the saver process, so that training comes first.
        debug_guard: Take checksums of what is copied behind the guard, and of its source when the guard is entered;
            a commit whose state was changed in between fails and names the tensor.
        arena_nbytes_max: Bound on the shared memory that states are staged in; None: what the state needs.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    on_busy: OnBusy = "wait"
    staging_threads: int | None = None
    saver_nice: int = 19
    debug_guard: bool = False
    arena_nbytes_max: int | None = None

    def __post_init__(self) -> None:
        if self.on_busy not in ("wait", "skip", "replace"):
            raise UsageError(
                "on_busy must be one of 'wait', 'skip', 'replace'", where=f"Policy(on_busy={self.on_busy!r})"
            )
        if self.staging_threads is not None and not 1 <= self.staging_threads <= 64:
            raise UsageError(
                "staging_threads must be between 1 and 64", where=f"Policy(staging_threads={self.staging_threads!r})"
            )
        if not 0 <= self.saver_nice <= 19:
            raise UsageError("saver_nice must be between 0 and 19", where=f"Policy(saver_nice={self.saver_nice!r})")
        if self.arena_nbytes_max is not None and self.arena_nbytes_max <= 0:
            raise UsageError(
                "arena_nbytes_max must be positive", where=f"Policy(arena_nbytes_max={self.arena_nbytes_max!r})"
            )

    @property
    def thread_count(self) -> int:
        """Threads that copy, the caller's included."""
        if self.staging_threads is not None:
            return self.staging_threads
        return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))

    @classmethod
    def of(cls, policy: object) -> SaverSettings:
        """Return what a policy says of these fields; the defaults where it has none of them."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(policy, name) for name in names if hasattr(policy, name)})
