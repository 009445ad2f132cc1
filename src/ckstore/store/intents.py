"""Intents: the files by which whoever drops or demotes a checkpoint refuses new tags on it while that is decided.

Invariants:
- An intent appears whole: it is written as a draft and linked to its names. So one that cannot be read was not torn by
  its maker's death; it counts until it is old, as does that of a maker who cannot be judged from here.
- Whoever removes one takes nothing from a maker who lives after all: in a folder a drop mark is a link of the intent,
  and a demotion looks at its intent again after it was published. Both give up when it is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckstore.clock import Clock
from ckstore.errors import BackendError, ConflictError, CorruptError, is_refused
from ckstore.format import paths as layout
from ckstore.format.records import IntentRecord, decode_record, encode_record
from ckstore.io.backend import Backend
from ckstore.processes import identity_of, owner_is_running
from ckstore.store.file_age import MAKER_AGE_SECONDS_MAX, is_older
from ckstore.store.pending_deletes import put_whole

CLEAR_INTENTS = "if that process is dead, `ckstore gc STORE --clear-intents` removes it"
"""What to do about one that cannot be judged from here."""

_RECORD_NBYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Intent:
    """An intent that counts.

    Attributes:
        path: Its name in the store.
        seq: What it is about.
        words: Who made it, and how old it is.
        is_known: Whether its maker was seen to be at work; False: it cannot be judged from here.
    """

    path: str
    seq: int
    words: str
    is_known: bool


def make_intents(backend: Backend, clock: Clock, run: str, seqs: Sequence[int], purpose: str) -> list[str]:
    """Say that these are about to be dropped or demoted; return the paths, whose folder the caller syncs."""
    now = clock.now_ns()
    record = IntentRecord(**identity_of(os.getpid()), acquired_ns=now, heartbeat_ns=now, what=purpose)
    paths = [layout.intent_name(run, seq, record.token) for seq in seqs]
    try:
        put_whole(backend, paths, encode_record(record), kind="intent")
    except BaseException:
        # As long as this process lives they would refuse tags.
        for path in paths:
            retract(backend, path)
        raise
    return paths


def retract(backend: Backend, path: str) -> None:
    """Remove an intent; one that stays after a crash is removed by a collection."""
    with contextlib.suppress(FileNotFoundError):
        backend.unlink(path)


def require(backend: Backend, path: str) -> None:
    """Be sure that an intent still refuses tags; ConflictError when somebody has removed it."""
    if backend.stat(path) is None:
        raise removed_meanwhile(backend, path)


def removed_meanwhile(backend: Backend, path: str) -> ConflictError:
    """Return the error of a maker whose intent is gone."""
    return ConflictError(
        "a collection took this process for dead and removed its intent; nothing was dropped or demoted",
        where=backend.location_of(path),
        todo="run the command again",
    )


def intents_in(backend: Backend, clock: Clock, run: str, seq: int | None = None) -> list[Intent]:
    """Return the intents of a run, or on one seq, that count: those whose maker is not known to be dead."""
    found = []
    for path, number in _paths(backend, run):
        if seq is None or number == seq:
            intent = _read(backend, clock, path, number)
            if intent is not None:
                found.append(intent)
    return found


def remove_abandoned(backend: Backend, clock: Clock, run: str, *, everyone: bool = False) -> int:
    """Remove the intents of makers that are dead, or all of them; return how many."""
    count = 0
    for path, seq in _paths(backend, run):
        if everyone or _read(backend, clock, path, seq) is None:
            retract(backend, path)
            count += 1
    return count


def _paths(backend: Backend, run: str) -> list[tuple[str, int]]:
    folder = layout.claims_folder(run)
    claims = ((name, layout.parse_claim_file(name)) for name in backend.list_names(folder))
    return [(f"{folder}/{name}", claim.seq) for name, claim in claims if claim is not None and claim.kind == "intent"]


def _read(backend: Backend, clock: Clock, path: str, seq: int) -> Intent | None:
    """Return an intent; None where it is gone, or its maker cannot be at work any more."""
    info = backend.stat(path)
    if info is None:
        return None
    hours = max(0.0, (clock.now_ns() - info.modified_ns) / 3.6e12)
    age = f"made {hours:.1f} h ago"
    try:
        content = backend.read_bytes(path, nbytes_max=_RECORD_NBYTES_MAX)
        maker = decode_record(content, IntentRecord, nbytes_max=_RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    except (CorruptError, BackendError) as error:
        if isinstance(error, BackendError) and not is_refused(error):
            raise
        words, is_running = f"an intent that cannot be read, {age}", None
    else:
        words = f"an intent to {maker.what} by pid {maker.pid} on host {maker.host}, {age}"
        is_running = owner_is_running(maker)
    if is_running is False:
        return None
    if is_running is None and is_older(backend, clock, info, MAKER_AGE_SECONDS_MAX):
        return None
    return Intent(path, seq, words, is_running is True)
