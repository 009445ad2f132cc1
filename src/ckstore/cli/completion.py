"""Candidates for shell completion: references, tags, runs and metrics of the store that the command line names.

Invariants:
- Nothing is raised or printed, and neither numpy nor torch is loaded: the shell waits at each press of Tab, and shows
  whatever is printed.
- A bucket is not asked, because every Tab would wait for it.
- Names that a shell would split or interpret are left out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ckstore.store.listing import RunLog

NEWEST = 200
"""How many of the newest checkpoints are candidates."""

_SAFE = re.compile(r"[A-Za-z0-9_./:+@%-]+")

Complete = Callable[[typer.Context, str], list[str]]


def _completion_of(candidates_of: Callable[[list[RunLog]], Iterator[str]], *, all_runs: bool = False) -> Complete:
    """Return a function for typer that completes a word with candidates from the store on the command line."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        # Not at module level: every command imports this module, and few need a listing.
        from ckstore.store.listing import log_of_store

        # An option that still lacks its value keeps the parser from naming the arguments.
        path = ctx.params.get("path") or next(iter(ctx.args), None)
        run = ctx.params.get("run") or "main"
        if not isinstance(path, str) or "://" in path:
            return []
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            shared = bool(ctx.params.get("allow_shared_folder"))
            # For the names of runs, one entry of each run is enough.
            only, limit = (None, 1) if all_runs else (run, NEWEST)
            found = [*candidates_of(log_of_store(path, run=only, limit=limit, allow_shared_folder=shared))]
        except Exception:
            # Whatever is wrong with the store, the command itself says it.
            return []
        finally:
            logging.disable(disabled)
        return [each for each in dict.fromkeys(found) if each.startswith(incomplete) and _SAFE.fullmatch(each)]

    return complete


def _refs_of(logs: list[RunLog]) -> Iterator[str]:
    for log in logs:
        yield "latest"
        yield from _tags_of(logs)
        yield from (f"best:{metric}" for metric in _metrics_of(logs))
        yield from (str(entry.step) for entry in log.entries)
        yield from (f"seq:{entry.seq}" for entry in log.entries)
        yield from (f"id:{entry.info.checkpoint_id[:12]}" for entry in log.entries if entry.info is not None)


def _tags_of(logs: list[RunLog]) -> Iterator[str]:
    for log in logs:
        yield from log.tags


def _metrics_of(logs: list[RunLog]) -> Iterator[str]:
    infos = [entry.info for log in logs for entry in log.entries]
    yield from sorted({metric for info in infos if info is not None for metric in info.metrics})


def _runs_of(logs: list[RunLog]) -> Iterator[str]:
    yield from (log.run for log in logs)


refs = _completion_of(_refs_of)
tags = _completion_of(_tags_of)
metrics = _completion_of(_metrics_of)
runs = _completion_of(_runs_of, all_runs=True)
