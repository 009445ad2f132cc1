"""Tags: names that people give to checkpoints and points; and intents, which refuse tags while a checkpoint is dropped.

A tag is a small file that is replaced by rename. An intent is a file that a drop or a demotion creates first.

Invariants:
- A tagged checkpoint is never dropped, nor is the keyframe that a tag on a point names. Setting a tag writes the tag
  and then checks for intents. A drop writes an intent and then reads the tags. One of the two sees the other.
- An intent appears whole: it is written as a draft and linked to its names. A process that dies never leaves a torn
  one. An unreadable intent therefore counts until it is old, and so does one whose process cannot be checked from here.
- Removing the intent of a process that is still alive is safe. In a folder, a drop mark is a link of the intent. A
  demotion checks for its intent again after it has published. Both give up if the intent is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckstore.clock import Clock
from ckstore.config import check_name, is_name
from ckstore.errors import BackendError, CkstoreError, ConflictError, CorruptError, NotFoundError, is_refused
from ckstore.format import paths
from ckstore.format.records import (
    IntentRecord,
    RecordPlace,
    TaggedPoint,
    TagRecord,
    decode_record,
    encode_record,
)
from ckstore.hashing import new_token
from ckstore.io.backend import Backend
from ckstore.processes import identity_of, owner_is_running
from ckstore.store.small_files import MAKER_AGE_SECONDS_MAX, is_older, put_whole

_log = logging.getLogger("ckstore")

CLEAR_INTENTS = "if that process is dead, `ckstore gc STORE --clear-intents` removes it"
"""What to do about an intent whose process cannot be checked from here."""

_RECORD_NBYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Intent:
    """An intent that counts.

    Attributes:
        path: Its path in the store.
        seq: The checkpoint that it protects.
        words: The process that made it, and its age.
        is_known: Whether that process was seen to run. False: it cannot be checked from here.
    """

    path: str
    seq: int
    words: str
    is_known: bool


def make_intents(backend: Backend, clock: Clock, run: str, seqs: Sequence[int], purpose: str) -> list[str]:
    """Announce that these seqs are about to be dropped or demoted; return the paths. The caller syncs their folder."""
    now = clock.now_ns()
    record = IntentRecord(**identity_of(os.getpid()), acquired_ns=now, heartbeat_ns=now, what=purpose)
    intents = [paths.intent_name(run, seq, record.token) for seq in seqs]
    try:
        put_whole(backend, intents, encode_record(record), kind="intent")
    except BaseException:
        # While this process runs, they would refuse tags.
        for path in intents:
            retract_intent(backend, path)
        raise
    return intents


def retract_intent(backend: Backend, path: str) -> None:
    """Remove an intent. After a crash, the next collection removes it."""
    with contextlib.suppress(FileNotFoundError):
        backend.unlink(path)


def require_intent(backend: Backend, path: str) -> None:
    """Check that an intent is still in place and refuses tags.

    Raises:
        ConflictError: A collection has removed it.
    """
    if backend.stat(path) is None:
        raise intent_removed_error(backend, path)


def intent_removed_error(backend: Backend, path: str) -> ConflictError:
    """Return the error for a process whose intent was removed."""
    return ConflictError(
        "a collection removed the intent of this process, which it took for dead; nothing was deleted or demoted",
        where=backend.location_of(path),
        todo="run the command again",
    )


def intents_in(backend: Backend, clock: Clock, run: str, seq: int | None = None) -> list[Intent]:
    """Return the intents of a run, or of one seq, whose process is not known to be dead."""
    found = []
    for path, number in _paths(backend, run):
        if seq is None or number == seq:
            intent = _read(backend, clock, path, number)
            if intent is not None:
                found.append(intent)
    return found


def remove_abandoned(backend: Backend, clock: Clock, run: str, *, everyone: bool = False) -> int:
    """Remove the intents of dead processes, or with ``everyone`` all of them; return how many."""
    count = 0
    for path, seq in _paths(backend, run):
        if everyone or _read(backend, clock, path, seq) is None:
            retract_intent(backend, path)
            count += 1
    return count


def _paths(backend: Backend, run: str) -> list[tuple[str, int]]:
    folder = paths.claims_folder(run)
    claims = ((name, paths.parse_claim_file(name)) for name in backend.list_names(folder))
    return [(f"{folder}/{name}", claim.seq) for name, claim in claims if claim is not None and claim.kind == "intent"]


def _read(backend: Backend, clock: Clock, path: str, seq: int) -> Intent | None:
    """Return an intent; None if it is gone or its process cannot be running."""
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


def place_of_tagged(point: TaggedPoint) -> RecordPlace:
    """Return the record of a journal that a tag is on."""
    token, record_id = bytes.fromhex(point.token), bytes.fromhex(point.record_id)
    return RecordPlace(token=token, number=point.number, record_id=record_id)


class Tags:
    """The tags of one run, and the intents on its checkpoints."""

    def __init__(self, backend: Backend, run: str, clock: Clock) -> None:
        self._backend = backend
        self._run = run
        self._clock = clock
        self._folder = paths.tags_folder(run)

    def all(self, *, is_strict: bool = False) -> dict[str, TagRecord]:
        """Return every tag by name. One that cannot be read is logged and left out.

        Args:
            is_strict: Raise CorruptError for a damaged tag, and BackendError for one that this user may not read.
                Callers that drop checkpoints need this: the tag may point to any of them.
        """
        found: dict[str, TagRecord] = {}
        try:
            names = self._backend.list_names(self._folder)
        except BackendError as error:
            if is_strict or not is_refused(error):
                raise
            _log.warning("%s", error)
            return found
        for name in filter(is_name, names):
            try:
                found[name] = self.get(name)
            except NotFoundError:
                continue
            except (CorruptError, BackendError) as error:
                if is_strict or not (isinstance(error, CorruptError) or is_refused(error)):
                    raise
                _log.warning("%s", error)
        return found

    def that_keep(self, seq: int, *, is_strict: bool = False) -> list[str]:
        """Return the tags that keep a checkpoint: those on it, and those on points whose keyframe it is; sorted.

        Args:
            seq: The checkpoint.
            is_strict: As for ``all``.
        """
        return sorted(name for name, record in self.all(is_strict=is_strict).items() if record.seq == seq)

    def names_of(self, seq: int) -> list[str]:
        """Return the names of the tags on a checkpoint, sorted."""
        return sorted(name for name, record in self.all().items() if record.seq == seq and record.point is None)

    def on_points(self, *, is_strict: bool = False) -> dict[str, TagRecord]:
        """Return the tags on points by name, sorted. ``is_strict`` as for ``all``."""
        return {name: record for name, record in sorted(self.all(is_strict=is_strict).items()) if record.point}

    def get(self, name: str) -> TagRecord:
        """Return the record of a tag.

        Raises:
            NotFoundError: There is no such tag.
            CorruptError: Its file is damaged; set the tag again.
        """
        path = paths.tag_name(self._run, check_name(name, "tag"))
        try:
            content = self._backend.read_bytes(path, nbytes_max=_RECORD_NBYTES_MAX)
        except FileNotFoundError:
            raise NotFoundError(
                f"run {self._run!r} has no tag {name!r}", where=self._backend.root, todo="`ckstore ls` shows the tags"
            ) from None
        try:
            return decode_record(content, TagRecord, nbytes_max=_RECORD_NBYTES_MAX)
        except CorruptError as error:
            raise type(error)(
                f"the file of tag {name!r} is damaged", where=self._backend.location_of(path), todo="set the tag again"
            ) from error

    def put(
        self,
        name: str,
        *,
        seq: int,
        step: int,
        checkpoint_id: bytes,
        is_dropped: Callable[[int], bool],
        place: RecordPlace | None = None,
    ) -> None:
        """Point a tag at a checkpoint, durably, then check that the checkpoint is not being dropped.

        The check runs before the write as well, so that a refused tag rarely leaves its old checkpoint. Only the check
        after the write is safe against a concurrent drop. If that one refuses, the old tag is restored. In the
        milliseconds between, the old checkpoint is unprotected: a drop that reads the tags then may remove it.

        Args:
            name: The tag.
            seq: The checkpoint, or the keyframe of the point.
            step: Step of the checkpoint or point.
            checkpoint_id: Id of the checkpoint ``seq``.
            is_dropped: Whether a seq has been dropped.
            place: The record of the point; None: the tag is on the checkpoint itself.

        Raises:
            ConflictError: The checkpoint is being dropped or demoted. The tag is as it was before.
        """
        path = paths.tag_name(self._run, check_name(name, "tag"))
        self._refuse_if_dropped(name, seq, is_dropped)
        before: bytes | None = None
        with contextlib.suppress(FileNotFoundError, CorruptError):
            before = self._backend.read_bytes(path, nbytes_max=_RECORD_NBYTES_MAX)
        point = None
        if place is not None:
            point = TaggedPoint(token=place.token.hex(), number=place.number, record_id=place.record_id.hex())
        now_ns = self._clock.now_ns()
        record = TagRecord(seq=seq, step=step, checkpoint_id=checkpoint_id.hex(), time_ns=now_ns, point=point)
        self._replace(path, encode_record(record))
        try:
            self._refuse_if_dropped(name, seq, is_dropped)
        except ConflictError:
            if before is None:
                self._remove(path)
            else:
                self._replace(path, before)
            raise

    def _refuse_if_dropped(self, name: str, seq: int, is_dropped: Callable[[int], bool]) -> None:
        # Intents first: a drop that ends between the two checks removes its intent after it has deleted.
        for intent in self.intents_on(seq):
            raise ConflictError(
                f"seq {seq} is being deleted or demoted; tag {name!r} was not set. Found {intent.words}",
                where=self._backend.location_of(intent.path),
                todo="wait until that has ended, or tag another checkpoint"
                + ("" if intent.is_known else f"; {CLEAR_INTENTS}"),
            )
        if is_dropped(seq):
            raise ConflictError(
                f"seq {seq} is being deleted; tag {name!r} was not set",
                where=self._backend.location_of(paths.tag_name(self._run, name)),
                todo="tag another checkpoint",
            )

    def remove(self, name: str) -> None:
        """Remove a tag, durably; NotFoundError if there is none."""
        self.get(name)
        self._remove(paths.tag_name(self._run, name))

    def _replace(self, path: str, content: bytes) -> None:
        draft = f"{paths.TMP_FOLDER}/{new_token()}.tag"
        self._backend.create(draft, content, sync=True)
        self._backend.rename(draft, path)
        self._backend.sync_folder(self._folder)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._backend.unlink(path)
        self._backend.sync_folder(self._folder)

    # Intents

    def declare(self, seq: int, purpose: str) -> str:
        """Write an intent to drop or demote a seq, durably; return its path."""
        return self.declare_all([seq], purpose)[0]

    def declare_all(self, seqs: Sequence[int], purpose: str) -> list[str]:
        """Write intents to drop or demote all of these seqs, durably; return their paths."""
        intents = make_intents(self._backend, self._clock, self._run, seqs, purpose)
        try:
            self._backend.sync_folder(paths.claims_folder(self._run))
        except BaseException:
            # While this process runs, they would refuse tags.
            for path in intents:
                with contextlib.suppress(CkstoreError):
                    self.retract(path)
            raise
        return intents

    def retract(self, path: str) -> None:
        """Remove an intent. After a crash, the next collection removes it."""
        retract_intent(self._backend, path)

    def intents_on(self, seq: int) -> list[Intent]:
        """Return the intents on a seq whose process is not known to be dead."""
        return intents_in(self._backend, self._clock, self._run, seq)
