"""One rank's commits: react to what the protocol asks for, until the commit has ended on all ranks.

The same code runs in the trainer (``Store.commit``) and in the saver (``Store.commit_async``).

Invariants:
- Every rank that calls gets the same receipt, or an error that names the rank that caused it. No call waits without
  limit: the connection finds ranks that are dead, stopped, or never join.
- An error of this rank reaches the others before it is raised here.
- A rank that is still writing when the commit has failed stops before its next chunk.
- Packs are removed only if the manifest is certainly not in the store.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from ckstore.config import Policy, policy_row
from ckstore.errors import CapacityError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.error_records import ErrorRecord, record_of, restored_error
from ckstore.format.many_ranks import world_of
from ckstore.format.paths import manifests_folder
from ckstore.hashing import PackId
from ckstore.ranks.actions import Action, Finish, LookUp, Merge, Plan, Publish
from ckstore.ranks.calls import Calls
from ckstore.ranks.link import CommitEnded, Link
from ckstore.ranks.messages import Begin, More, Wanted, Write
from ckstore.ranks.work import (
    MAY_BE_VISIBLE,
    RankContents,
    RankRequest,
    RankTools,
    RankWork,
    Root,
    decode_more,
    decode_receipt,
    encode_receipt,
)
from ckstore.results import Receipt, Stopwatch
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")

LOOK_SECONDS = 0.5
"""How often a waiting rank checks whether its own commit was given up."""

ABORT_SECONDS = 30.0
"""How long a rank that has aborted a commit waits for its end. Rank 0 answers immediately, or is found to be lost."""

FOUND_SECONDS = 3.0
"""How long to look for a commit of a lost rank 0: a shared folder may show another host's files late.

NFS may need 60 s, which is more than a rank may wait for its answer. Then it gets an error for a durable checkpoint.
"""

_MANIFESTS_MAX = 8
"""Manifests, newest first, that are searched for a commit whose outcome is not known."""


class Staging(Protocol):
    """A state that is still being copied into an arena while it is committed."""

    def check(self) -> None:
        """Raise if the commit was given up."""
        ...

    def wait_whole(self) -> None:
        """Wait until all bytes are staged."""
        ...

    def when_whole(self, call: Callable[[], None]) -> None:
        """Have a function called once all bytes are staged, on any thread."""
        ...


class RankCommits:
    """The commits of one rank, one after another.

    Args:
        link: The connection to the other ranks.
        tools: What this rank keeps from one commit for the next.
        on_divergence: What to do if replicas of a tensor differ: ``"warn"`` or ``"raise"``.
        calls: The calls of a trainer; None in a saver.
    """

    def __init__(
        self, link: Link, tools: RankTools, *, on_divergence: str = "warn", calls: Calls | None = None
    ) -> None:
        self._link, self._tools, self._calls = link, tools, calls
        self._root: Root | None = None
        if link.rank == 0:
            # Other handles may use the same connection. The ranks do not send again what rank 0 knows.
            known = link.once(RankContents)
            self._root = Root(tools.repository, known, on_divergence=on_divergence)
        self.failure: ErrorRecord | None = None
        """Why the last commit failed: the same on all ranks. None: it succeeded, or its end is not known."""
        self.share_nbytes: int | None = None
        """Bytes of the state that this rank had to write in the last commit. None: that was not planned."""

    def commit(
        self,
        step: int,
        policy: Policy,
        make_request: Callable[[], RankRequest],
        *,
        number: int | None = None,
        staging: Staging | None = None,
        take_run: Callable[[], None] | None = None,
    ) -> Receipt:
        """Commit this rank's state as its part of a checkpoint. Called by all ranks.

        Args:
            step: The trainer's step.
            policy: How to store the state.
            make_request: Captures the state. What it raises is raised on all ranks.
            number: The number of the commit, the same on all ranks; None: one more than the last.
            staging: The state, if it is still being staged.
            take_run: Rank 0: takes the lease of the run; None: as every commit does.

        Raises:
            CkstoreError: The commit failed on one of the ranks; the message names it.
        """
        link = self._link
        number = link.next_number() if number is None else link.take_number(number)
        # Before the state is captured: then the others wait for this rank as long as it lives.
        handle, background = "", 0
        if self._calls is not None:
            self._calls.begin(number)
            handle, background = self._calls.handle, self._calls.background
        link.send(lambda member: member.join(number, step, handle, background))
        commit = _RankCommit(link, self._tools, self._root, number, step)
        try:
            return self._committed(commit, policy, make_request, staging, take_run)
        finally:
            self.failure, self.share_nbytes = commit.failure, commit.share_nbytes

    def _committed(
        self,
        commit: _RankCommit,
        policy: Policy,
        make_request: Callable[[], RankRequest],
        staging: Staging | None,
        take_run: Callable[[], None] | None,
    ) -> Receipt:
        try:
            if self._root is not None:
                (take_run or self._take_run)()
            request = make_request()
            commit.begin(request, _facts(self._tools.repository, policy), staging)
        except BaseException as error:
            return commit.give_up(error)
        return commit.run()

    def has_removed_cause(self, step: int, nbytes: int) -> bool:
        """Return whether the commit that failed last may succeed now. Called by all ranks; the same on all.

        Args:
            step: The step.
            nbytes: Bytes of this rank's state: what it may write, if the commit failed before that was planned.
        """
        failure = self.failure
        if failure is None:
            return False
        if failure.kind == "CapacityError":
            error = restored_error(failure, source="the job", other=CkstoreError)
            wanted = nbytes if self.share_nbytes is None else self.share_nbytes
            return isinstance(error, CapacityError) and self._has_made_room(wanted, error)
        names = failure.facts.get("pack_ids")
        if failure.kind != "ConflictError" or not isinstance(names, list):
            return False
        _log.warning("packs vanished during the commit of step %d; repeating it without them", step)
        self._tools.repository.chunk_index.forget_packs([PackId(bytes.fromhex(name)) for name in names])
        return True

    def _has_made_room(self, nbytes: int, error: CapacityError) -> bool:
        """Have rank 0 free space for what all ranks want to write. Return whether it could."""
        from ckstore.ops.commit import room_after

        def decide(values: tuple[bytes, ...]) -> bytes:
            wanted = sum(int.from_bytes(value, "little") for value in values)
            try:
                room = room_after(self._tools.repository, wanted, error)
            except CapacityError:
                return b""
            _log.warning("the disk was full: %s; what was in the trash can no longer be restored", room)
            return b"freed"

        return bool(self._link.agree("commit (room on the disk)", nbytes.to_bytes(8, "little"), decide))

    def decline(self, number: int, step: int, error: Exception) -> None:
        """Make a commit fail on all ranks, because this rank cannot take part.

        Args:
            number: The number of the commit.
            step: The step.
            error: Why. The others get it with the number of this rank.
        """
        link = self._link
        number, record = link.take_number(number), record_of(error)
        link.send(lambda member: member.abort(number, step, record))
        while not isinstance(link.wait(number, LOOK_SECONDS), Finish):
            # Ends: rank 0 answers, or is lost.
            pass

    def _take_run(self) -> None:
        self._tools.repository.wait_for_orphan()
        self._tools.repository.prepare_run()
        self._tools.repository.lease.take()


def _facts(repository: Repository, policy: Policy) -> dict[str, str]:
    """Return what must be equal on all ranks."""
    usual = policy_row(Policy())
    changed = {name: value for name, value in policy_row(policy).items() if value != usual[name]}
    settings = {f"policy setting {name}": repr(value) for name, value in changed.items()}
    return {"store": repository.store_id.hex(), "run": repository.run, **settings}


class _RankCommit:
    """One commit of this rank."""

    def __init__(self, link: Link, tools: RankTools, root: Root | None, number: int, step: int) -> None:
        self._link, self._tools, self._root = link, tools, root
        self._number, self._step = number, step
        self._watch = Stopwatch(tools.repository.clock)
        self._work: RankWork | None = None
        self._request: RankRequest | None = None
        self._staging: Staging | None = None
        self._may_be_visible = False
        self.failure: ErrorRecord | None = None

    @property
    def share_nbytes(self) -> int | None:
        """Bytes of the state that this rank has to write. None: that was not planned yet."""
        return None if self._work is None else self._work.share_nbytes

    def begin(self, request: RankRequest, facts: dict[str, str], staging: Staging | None) -> None:
        """Take part in the commit."""
        number = self._number
        self._request, self._staging = request, staging
        work = self._work = RankWork(
            self._tools, request, self._link.attempt_id(number), check=lambda: self._link.check_commit(number)
        )
        begin = Begin(number, self._step, staging is not None, facts, work.digests)
        self._link.send(lambda member: member.begin(begin))
        if staging is not None:
            staging.when_whole(lambda: self._link.send(lambda member: member.staged(number)))

    def run(self) -> Receipt:
        """Do what the protocol asks for, until the commit has ended."""
        try:
            while not isinstance(action := self._link.wait(self._number, LOOK_SECONDS), Finish):
                if self._staging is not None:
                    self._staging.check()
                if action is not None:
                    # The next action is then the end.
                    with contextlib.suppress(CommitEnded):
                        self._do(action)
        except BaseException as error:
            return self.give_up(error)
        return self._finish(action)

    def give_up(self, error: BaseException) -> Receipt:
        """Tell all ranks that this one has failed. Raise the error, unless the checkpoint was published before.

        Raises:
            BaseException: ``error``.
        """
        number, step, record = self._number, self._step, record_of(error)
        self._link.send(lambda member: member.abort(number, step, record))
        finish = self._finish_of_abort(record)
        self.failure = None if finish is None else finish.error
        if finish is not None and finish.receipt is not None and isinstance(error, Exception):
            return self._finish(finish)
        if self._work is not None:
            self._work.fail(is_unpublished=self._is_unpublished(finish))
        raise error

    def _is_unpublished(self, finish: Finish | None) -> bool:
        """Return True if the manifest of a failed commit is certainly not in the store. Then packs may be removed."""
        if finish is None or finish.error is None or self._may_be_visible:
            return False
        return not finish.error.facts.get(MAY_BE_VISIBLE)

    def _finish_of_abort(self, record: ErrorRecord) -> Finish | None:
        """Wait for the end of a commit that this rank has aborted. None: Ctrl-C came while its end was being taken."""
        number, clock = self._number, self._tools.repository.clock
        deadline = clock.monotonic() + ABORT_SECONDS
        while clock.monotonic() < deadline:
            action = self._link.wait(number, LOOK_SECONDS)
            if isinstance(action, LookUp):
                self._look_up()
            elif isinstance(action, Publish | Merge | Plan) and self._root is not None:
                self._link.lead(lambda coordinator: coordinator.failed(number, record))
            elif isinstance(action, Finish):
                return action
        return None

    def _do(self, action: Action) -> None:
        assert self._work is not None, "begin comes first"
        number, work = self._number, self._work
        if isinstance(action, Wanted):
            contents = {digest: work.content(digest) for digest in action.digests}
            self._link.send(lambda member: member.contents(number, contents))
        elif isinstance(action, Write):
            assert action.spans is not None, "the member remembers the spans"
            self._send_part(work.write(action.spans))
        elif isinstance(action, More):
            self._send_part(work.write_more(decode_more(action.content)))
        elif isinstance(action, LookUp):
            self._look_up()
        else:
            self._lead(action)

    def _send_part(self, part: bytes) -> None:
        number = self._number
        if self._staging is not None:
            # Everything was read, but only now is it certain that the checkpoint is wanted.
            self._staging.wait_whole()
        self._link.send(lambda member: member.part(number, part))

    def _lead(self, action: Action) -> None:
        """Rank 0: do the work for all ranks. What it raises fails the commit on all of them."""
        number, root = self._number, self._root
        assert root is not None, "only rank 0 leads"
        assert self._request is not None
        assert self._work is not None
        try:
            if isinstance(action, Plan):
                spans = root.plan(action.digests, action.contents)
                self._link.lead(lambda coordinator: coordinator.planned(number, spans))
            elif isinstance(action, Merge):
                more = root.merge(action.parts)
                if more:
                    self._link.lead(lambda coordinator: coordinator.more(number, more))
                else:
                    self._link.lead(lambda coordinator: coordinator.merged(number))
            elif isinstance(action, Publish):
                receipt = root.publish(self._request, self._work.watch)
                self._link.lead(lambda coordinator: coordinator.published(number, receipt))
        except BaseException as error:
            record = record_of(error)
            if isinstance(error, MalformedError) and record.todo is None:
                record = record._replace(todo="report this")
            # Then no rank removes its packs.
            record.facts[MAY_BE_VISIBLE] = root.may_be_visible(error)
            self._link.lead(lambda coordinator: coordinator.failed(number, record))
            if not isinstance(error, Exception):
                raise

    def _look_up(self) -> None:
        number = self._number
        receipt = None
        clock = self._tools.repository.clock
        deadline = clock.monotonic() + FOUND_SECONDS
        while receipt is None and clock.monotonic() < deadline:
            try:
                receipt = find_attempt(self._tools.repository, self._link.attempt_id(number))
            except CkstoreError as error:
                _log.warning("could not look for the checkpoint of step %d: %s", self._step, error)
            if receipt is None:
                clock.sleep(LOOK_SECONDS)
        if receipt is None:
            # Rank 0 may only be slow. So this rank keeps its packs; gc removes them if nothing names them.
            self._may_be_visible = True
            self._link.send(lambda member: member.not_found(number))
        else:
            encoded = receipt
            self._link.send(lambda member: member.found(number, encoded))

    def _finish(self, finish: Finish) -> Receipt:
        work = self._work
        if finish.receipt is not None:
            receipt = decode_receipt(finish.receipt)
            if work is not None:
                work.finish(receipt)
            return receipt
        assert finish.error is not None, "a commit ends with a receipt or an error"
        self.failure = finish.error
        if work is not None:
            work.fail(is_unpublished=self._is_unpublished(finish))
        raise self._link.error_of(finish.rank, finish.error)


def find_attempt(repository: Repository, attempt: bytes) -> bytes | None:
    """Return the encoded receipt of a commit if its checkpoint is in the store; None: it is not there now."""
    names = repository.manifests.listing().names[-_MANIFESTS_MAX:]
    for name in reversed(names):
        try:
            manifest = repository.manifests.load(name)
        except (FileNotFoundError, CorruptError, UnsupportedError):
            continue
        world = world_of(manifest.tree)
        if world is not None and world.attempt == attempt:
            # Rank 0 may have been lost right after the manifest became visible. Do what it would have done next.
            repository.backend.sync_folder(manifests_folder(repository.run))
            if repository.rescue_local_packs({pack.pack_id: pack.nbytes for pack in manifest.packs}):
                return None
            repository.manifests.note_published(name.seq)
            watch, engine = Stopwatch(repository.clock), repository.engine_name
            found = Receipt.of(manifest, watch, engine=engine, warnings=(), chunks_delta=0, chunks_derived=0)
            return encode_receipt(found)
    return None
