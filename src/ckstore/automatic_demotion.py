"""Demote after every so many commits, in a process of its own, so that no commit waits for it.

It takes no lease: the trainer that lives holds that, and demoting what is not the newest needs none (docs/FORMAT.md,
Replace). What was tried in vain is remembered as long as the handle lives, and not tried again after every commit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import IO, Any, ClassVar, Literal

from ckstore.after_commits import AfterCommits
from ckstore.config import DemotePolicy, Policy
from ckstore.demote_policy import policy_of_rules, rules_of, stored_demotion
from ckstore.errors import CkstoreError, UsageError
from ckstore.io.address import backend_for
from ckstore.io.backend import Distant
from ckstore.policies import policy_of, policy_row
from ckstore.store.parts import Parts, read_store_record

_PROGRAM = "from ckstore.automatic_demotion import work; work()"

Wanted = DemotePolicy | Literal["stored"]


class AutomaticDemotion(AfterCommits):
    """Demotes what has aged in one run after every so many commits.

    Args:
        parts: The store and its run.
        wanted: Which stay exact; ``"stored"``: as the store says at that time, and without that nothing is demoted.
        policy: Threads and memory.
        every: Commits of the run from one demotion to the next.

    Raises:
        UsageError: ``every`` is not positive, or the store lies in a bucket, where it needs the trainer's lease.
    """

    work: ClassVar[str] = "demotion"
    option: ClassVar[str] = "demote_every"
    tells: ClassVar[bool] = True
    nice: ClassVar[int] = 19

    def __init__(self, parts: Parts, wanted: Wanted, policy: Policy, every: int = 1) -> None:
        super().__init__(parts, every)
        if isinstance(parts.backend, Distant):
            raise UsageError(
                "nothing is demoted in a bucket while it is written to",
                where=parts.backend.root,
                todo="open it without demotion=, and run `ckstore demote` when no trainer runs",
            )
        self._wanted = wanted
        self._policy = policy
        self._tried: set[int] = set()

    def command(self, root: str) -> tuple[str, Sequence[str], bytes]:
        """Return the program of a child, and the store, the rules and the seqs to pass over as JSON."""
        asked = {
            "root": root,
            "run": self._parts.run,
            "rules": None if isinstance(self._wanted, str) else rules_of(self._wanted),
            "policy": policy_row(self._policy),
            "tried": sorted(self._tried),
        }
        return _PROGRAM, (), json.dumps(asked).encode()

    def work_here(self) -> None:
        """Demote in this process."""
        parts = Parts(self._parts.backend, self._parts.record, self._parts.run, clock=self._parts.clock)
        wanted = stored_demotion(parts) if isinstance(self._wanted, str) else self._wanted
        self._tried |= set(_demoted(parts, wanted, self._policy, self._tried))

    def note(self, told: IO[bytes]) -> None:
        """Remember which seqs a child has tried in vain."""
        self._tried |= set(json.load(told)["tried"])


def work() -> None:
    """Do what the parent asks for on the standard input, and tell there what was tried in vain; the child's main."""
    asked: dict[str, Any] = json.load(sys.stdin)
    try:
        # Whoever opened the store has accepted its folder.
        backend = backend_for(asked["root"], allow_shared_folder=True)
        parts = Parts(backend, read_store_record(backend), asked["run"])
        rules = asked["rules"]
        wanted = stored_demotion(parts) if rules is None else policy_of_rules(rules)
        tried = _demoted(parts, wanted, policy_of(asked["policy"]), set(asked["tried"]))
        parts.close()
    except CkstoreError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    json.dump({"tried": tried}, sys.stdout)


def _demoted(parts: Parts, wanted: DemotePolicy | None, policy: Policy, tried: set[int]) -> list[int]:
    """Demote; return the seqs for which that came to nothing, and would again."""
    if wanted is None:
        return []
    from ckstore.demote import demote

    report = demote(parts, wanted, policy, passed_over=tried, dry_run=False)
    return [entry.seq for entry in report.entries if entry.is_final]
