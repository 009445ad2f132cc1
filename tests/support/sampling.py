"""Choose which part of a long programme a run executes.

A programme is a test marked ``deep``: it visits many points (system calls to be killed at, bytes to be flipped). Its
*cases* are its parametrizations, and a case may divide its *points* further by ``Sample.part``. The number of the
commit, counted from the first, says which cases and which points have their turn.

Invariants:
- Any ``COMMITS_MAX`` successive commits visit every point of every case of every programme, whatever the depth.
- A slice has the size of a sample. Of one commit it takes the points that a sample half a round of commits later takes:
  none that the sample of the same commit takes. Only a programme that is not divided runs whole in both, with other
  seeds.
- A run is repeated by the commit's number and hash, which its summary prints.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

COMMITS_MAX = 64
"""Into so many parts a programme may be divided, cases and points together."""

DEPTHS = ("sample", "slice", "all")
"""``make test`` samples, ``.ci/run`` adds a slice of other points, ``make test-deep`` runs all points."""

_SEED_OF_SLICE = 1 << 30
"""Added to the seeds of a slice. Programmes count trials up from their seed: the distance must be long."""

VARIABLE = "CKSTORE_TEST_COMMIT"
"""``NUMBER:HASH`` of the commit to sample for; by default that of the checkout."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that is tested.

    Attributes:
        number: How many commits the branch has, this one included; a merge counts once. Successive commits take turns.
        digest: Its hash, which seeds what is random.
    """

    number: int
    digest: str

    @classmethod
    def of_checkout(cls, folder: Path) -> Commit:
        """Return the one that is checked out.

        A shallow clone does not know how many commits there were: there the hash decides, so that any part of a
        programme may run. Outside a repository the first part always runs.
        """
        if text := os.environ.get(VARIABLE):
            number, _, digest = text.partition(":")
            return cls(int(number), digest or "0")
        try:
            digest = _git(folder, "rev-parse", "HEAD")
            if _git(folder, "rev-parse", "--is-shallow-repository") == "true":
                return cls(int(digest[:8], 16), digest)
            return cls(int(_git(folder, "rev-list", "--count", "--first-parent", "HEAD")), digest)
        except (OSError, subprocess.CalledProcessError):
            return cls(0, "0")

    @property
    def seed(self) -> int:
        """A number below 2**32 that the hash decides."""
        return int(self.digest[:8], 16)

    def __str__(self) -> str:
        return f"{self.number}:{self.digest[:12]}"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True, slots=True)
class Sample:
    """What one case of a programme does in this run.

    Attributes:
        commit: The commit that is tested.
        depth: One of ``DEPTHS``.
        case_parts: Into how many parts the cases of the programme are divided.
    """

    commit: Commit
    depth: str
    case_parts: int = 1

    @property
    def is_whole(self) -> bool:
        """Every point has its turn in this run."""
        return self.depth == "all"

    def takes(self, case: int) -> bool:
        """Say whether a case, numbered from 0, has its turn."""
        later = self.case_parts // 2 if self.depth == "slice" else 0
        return self.is_whole or (case + self.commit.number + later) % self.case_parts == 0

    def part(self, points: Sequence[T], *, parts: int) -> list[T]:
        """Return the points that have their turn: each ``parts``-th, others with each commit and in a slice.

        Args:
            points: All points of this case, in an order that does not change from commit to commit.
            parts: Into how many parts they are divided.
        """
        assert self.case_parts * parts <= COMMITS_MAX, f"{self.case_parts} x {parts} parts: at most {COMMITS_MAX}"
        if self.is_whole:
            return list(points)
        # Where cases are divided, a slice takes other cases.
        later = parts // 2 if self.depth == "slice" and self.case_parts == 1 else 0
        return list(points[(self.commit.number // self.case_parts + later) % parts :: parts])

    def count(self, all_of_them: int, *, parts: int) -> int:
        """Return how many random trials to make, where there is no list of points: at least one."""
        return all_of_them if self.is_whole else max(1, -(-all_of_them // parts))

    def seed(self, fixed: int) -> int:
        """Return a seed for what is random: the same one in each deep run, another one with each commit otherwise."""
        if self.is_whole:
            return fixed
        return (fixed + self.commit.seed + (_SEED_OF_SLICE if self.depth == "slice" else 0)) % (1 << 31)
