"""This rank's connection to the other ranks of the job: pass events, wait for actions, agree on values.

It needs no torch, and works in a trainer and in a saver process alike. A thread of its own does all communication
(``io_loop.py``), so heartbeats go on during long calls of the main thread, and a stopped peer never blocks a caller. A
rank that loses its connection does not come back: the job must be started again.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from select import POLLIN, poll
from typing import TypeVar

from ckstore import __version__
from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import noop, start_thread
from ckstore.errors import CkstoreError, RankError, UsageError
from ckstore.format.error_records import ErrorRecord, record_of, restored_error
from ckstore.ranks import LINK_THREAD_NAME
from ckstore.ranks.actions import START_AGAIN, Action, Decide, Finish, attempt_id
from ckstore.ranks.connection import Connection, prepare
from ckstore.ranks.handshake import (
    GREETING_NBYTES,
    PROOF_NBYTES,
    is_answer,
    new_claim,
    new_greeting,
    parse_greeting,
)
from ckstore.ranks.io_loop import IoLoop, Job, Key, Timing
from ckstore.ranks.member import Member
from ckstore.ranks.messages import (
    PROTOCOL_VERSION,
    TO_RANK,
    Agreed,
    Awaited,
    Refused,
    SaverLost,
    Welcome,
    version_error,
)
from ckstore.ranks.protocol import Coordinator

_RETRY_SECONDS = 0.2
_WAIT_SECONDS = 5.0
_CHECK_SECONDS = 1.0
_REFUSED_SECONDS = 5.0
"""How long a saver tries to connect while all addresses of rank 0 refuse that."""

Address = tuple[str, int]


T = TypeVar("T")


class CommitEnded(Exception):
    """A commit has failed while this rank worked for it."""


class Link:
    """A rank's connection to its job. Thread-safe. Close it on every rank.

    Args:
        job: Who this rank is.
        timing: How long things may take.
        listener: Rank 0: a socket that listens for the others. It belongs to the link from now on.
        addresses: Other ranks: where rank 0 may be; the first that answers with the token is used.
        check: Called about every second until rank 0 has answered. What it raises ends the attempt.

    Raises:
        RankError: Rank 0 could not be reached in ``join_seconds``.
        UnsupportedError: Rank 0 runs another version of ckstore.
        UsageError: Rank 0 refused this rank.
    """

    def __init__(
        self,
        job: Job,
        timing: Timing | None = None,
        *,
        listener: socket.socket | None = None,
        addresses: Sequence[Address] = (),
        check: Callable[[], None] = noop,
    ) -> None:
        timing = Timing() if timing is None else timing
        self.rank, self.world = job.rank, job.world
        self._token = job.token
        self._number = 0
        self._questions: dict[str, int] = {}
        self._replies: dict[str, Callable[[], bytes]] = {}
        self._asking = threading.Lock()
        self._shared: dict[Callable[[], object], object] = {}
        self._pid = os.getpid()
        connection = None if job.rank == 0 else connect(job, addresses, timing, check)
        self._loop = IoLoop(job, timing, listener=listener, connection=connection)
        self.thread = threading.Thread(target=self._loop.run, name=LINK_THREAD_NAME, daemon=True)
        """Serves the connections."""
        start_thread(self.thread)
        # The thread keeps the loop alive, and not the link.
        self._end = weakref.finalize(self, _end, self._loop, self.thread, os.getpid(), timing.close_seconds + 1)

    def next_number(self) -> int:
        """Return the number of the next commit. Call it on every rank for every commit, also for one that fails."""
        number = self._number + 1
        while number in self._loop.declined:
            number += 1
        return self.take_number(number)

    def decline(self, number: int, step: int, error: ErrorRecord) -> None:
        """Fail a commit that other ranks have begun, and that this one does not take part in."""
        self._loop.declined.add(number)
        self.send(lambda member: member.abort(number, step, error))

    def take_number(self, number: int) -> int:
        """Begin a commit whose number the caller knows. Numbers ascend, and are the same on every rank."""
        self._require_own()
        assert number > self._number, "numbers ascend"
        self._number = number
        self._loop.boxes[number] = SimpleQueue()
        return number

    @property
    def is_broken(self) -> bool:
        """Whether another rank was lost, so that no commit can succeed any more."""
        return bool(self._loop.losses)

    def check(self) -> None:
        """Raise if another rank was lost, as far as this rank knows. Rank 0 knows about all, the others about rank 0.

        Raises:
            RankError: It names the rank.
        """
        for rank, how in list(self._loop.losses.items())[:1]:
            raise RankError(f"rank {rank} {how}", todo=START_AGAIN, rank=rank)

    def call_when_lost(self, call: Callable[[int, str], None]) -> None:
        """Have a function called, on any thread, for each rank that was or will be lost; perhaps twice.

        Args:
            call: Gets the rank, and what happened, to follow the name of the rank. It must neither wait nor raise.
        """
        self._loop.on_lost.append(call)
        for rank, how in list(self._loop.losses.items()):
            call(rank, how)

    def check_commit(self, number: int) -> None:
        """Raise if a commit has failed. Then ``wait`` returns its end. On any thread.

        Raises:
            CommitEnded: It has.
        """
        if number in self._loop.failed:
            raise CommitEnded

    def has_seen(self, number: int) -> bool:
        """Rank 0: whether a rank has taken part in a commit."""
        return self._loop.has_seen(number)

    def refuse(self, error: CkstoreError) -> None:
        """Rank 0: refuse ranks that connect from now on, with this error."""
        self._loop.refusal = error

    def call_when_all_staged(self, call: Callable[[int], None] | None) -> None:
        """Have a function called with the number of each commit of which all ranks are staged, on another thread."""
        self._loop.on_all_staged = call

    def watch(self, handle: str, call: Callable[[Awaited | SaverLost], ErrorRecord | None]) -> None:
        """Have a function called if other ranks wait for this one in a commit of a handle, or have lost their saver.

        In the first case, its error fails the commit. It is called on the thread of the connection, and must not wait.
        """
        self._loop.watchers[handle] = call

    def once(self, kind: Callable[[], T]) -> T:
        """Return the object of this class that all users of the connection share. The first of them makes it."""
        if kind not in self._shared:
            self._shared[kind] = kind()
        found: T = self._shared[kind]  # type: ignore[assignment]
        return found

    def attempt_id(self, number: int) -> bytes:
        """Return the 16 bytes by which a commit is found in the store."""
        return attempt_id(self._token + self._loop.nonce, number)

    def send(self, event: Callable[[Member], list[Action]]) -> None:
        """Pass an event to this rank's state machine, such as ``lambda member: member.part(number, content)``."""
        self._require_own()
        self._loop.post(event)

    def lead(self, event: Callable[[Coordinator], list[Action]]) -> None:
        """Rank 0: pass an event to the state machine for all ranks."""
        self._require_own()
        self._loop.lead(event)

    def wait(self, until: Key, seconds: float) -> Action | None:
        """Return the next action for a commit or question, or None if there is none in time.

        Finish is the last action of a commit, Agreed that of a question.

        Args:
            until: The number of the commit, or topic and number of the question.
            seconds: How long to wait.
        """
        self._require_own()
        try:
            action = self._loop.boxes[until].get(timeout=max(0.0, seconds))
        except Empty:
            return None
        if isinstance(action, (Finish, Agreed)):
            del self._loop.boxes[until]
            self._loop.failed.discard(until)
        return action

    def agree(
        self, topic: str, value: bytes, decide: Callable[[tuple[bytes, ...]], bytes], *, is_patient: bool = False
    ) -> bytes:
        """Return the same bytes on all ranks, or raise the same error. Called by all ranks.

        Args:
            topic: What is asked.
            value: This rank's value.
            decide: Called on rank 0 with the values of all ranks. What it raises is raised on all ranks.
            is_patient: Wait for ranks that have not asked yet for as long as they live.
        """
        self._require_own()
        number = self._questions[topic] = self._questions.get(topic, 0) + 1
        key = (topic, number)
        self._loop.boxes[key] = SimpleQueue()
        self.send(lambda member: member.ask(topic, number, value, is_patient=is_patient))
        try:
            while True:
                # Ends: rank 0 answers in join_seconds, or is lost.
                action = self.wait(key, _WAIT_SECONDS)
                if isinstance(action, Agreed):
                    break
                if isinstance(action, Decide):
                    self._decide(action, decide)
        except BaseException as error:
            if self.rank == 0:
                # Nobody else can answer the others.
                record = record_of(error)
                self.lead(lambda coordinator: coordinator.refuse(topic, number, record))
            raise
        return self._answer(action)

    def reply_to(self, topic: str, reply: Callable[[], bytes], decide: Callable[[tuple[bytes, ...]], bytes]) -> None:
        """Take part in a question that any rank may ask once, without a call of this rank.

        Args:
            topic: What is asked.
            reply: Returns this rank's value. Called on the thread of the connection; it must not wait.
            decide: Rank 0: returns the answer from the values of all ranks. Called there, too.
        """
        self._require_own()
        self._loop.boxes[topic, 1] = SimpleQueue()
        self._replies[topic] = reply
        self._loop.deciders[topic] = decide
        self._loop.repliers[topic] = lambda: self.ask(topic)
        if topic in self._loop.asked:
            self.ask(topic)

    def ask(self, topic: str) -> None:
        """Ask a question of ``reply_to``, or reply to it. Returns immediately; only the first call has an effect."""
        with self._asking:
            if topic in self._questions:
                return
            self._questions[topic] = 1
            value = self._replies[topic]()
        self.send(lambda member: member.ask(topic, 1, value))

    def answer_to(self, topic: str) -> bytes:
        """Wait for the answer to a question of ``reply_to``. Call it once.

        Raises:
            RankError: A rank was lost, or did not reply.
        """
        while True:
            # Ends: rank 0 answers in join_seconds, or is lost.
            action = self.wait((topic, 1), _WAIT_SECONDS)
            if isinstance(action, Agreed):
                return self._answer(action)

    def error_of(self, rank: int | None, record: ErrorRecord) -> Exception:
        """Return the exception of an action.

        Args:
            rank: The rank that caused it, if one did.
            record: The error.
        """
        return restored_error(record, source="the job" if rank is None else f"rank {rank}", other=RankError)

    def close(self) -> None:
        """Send what is queued, and close the connections. Commits that have not ended fail. May be called again."""
        self._end()

    def _decide(self, question: Decide, decide: Callable[[tuple[bytes, ...]], bytes]) -> None:
        topic, number = question.topic, question.number
        try:
            value = decide(question.values)
        except BaseException as error:
            record = record_of(error)
            self.lead(lambda coordinator: coordinator.decided(topic, number, record))
            if not isinstance(error, Exception):
                raise
        else:
            self.lead(lambda coordinator: coordinator.decided(topic, number, value))

    def _answer(self, agreed: Agreed) -> bytes:
        if agreed.error is not None:
            raise self.error_of(agreed.rank, agreed.error)
        assert agreed.value is not None, "an answer has a value or an error"
        return agreed.value

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "a forked child cannot use its parent's connection to the other ranks", todo="open a store"
            )


def _end(loop: IoLoop, thread: threading.Thread, pid: int, seconds: float) -> None:
    if os.getpid() == pid:
        loop.stop()
        thread.join(seconds)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket on which rank 0 accepts the other ranks.

    Args:
        host: The address to listen at; empty: all of this machine.
        port: 0: a free one.

    Raises:
        OSError: The port is taken, or the address is not of this machine.
    """
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", port), backlog=4096)


def connect(job: Job, addresses: Sequence[Address], timing: Timing, check: Callable[[], None] = noop) -> Connection:
    """Connect to rank 0, trying all addresses again until one answers. ``check`` may end that by an exception.

    Raises:
        RankError: None did in ``join_seconds``.
        UnsupportedError: Rank 0 runs another version of ckstore.
        UsageError: Rank 0 refused this rank.
    """
    begun = SYSTEM_CLOCK.monotonic()
    deadline = begun + timing.join_seconds
    reasons: dict[Address, str] = {}
    while True:
        is_refused = True
        for address in addresses:
            check()
            left = deadline - SYSTEM_CLOCK.monotonic()
            try:
                return _connect(job, address, min(left, timing.handshake_seconds), check)
            except OSError as error:
                reasons[address] = error.strerror or str(error)
                is_refused = is_refused and error.errno == errno.ECONNREFUSED
        now = SYSTEM_CLOCK.monotonic()
        # Rank 0 listens for savers before their trainers know where. If all addresses refuse, it has ended.
        is_gone = job.past is not None and is_refused and now >= begun + _REFUSED_SECONDS
        if is_gone or now + _RETRY_SECONDS >= deadline:
            tried = ", ".join(f"{host}:{port} ({reason})" for (host, port), reason in reasons.items())
            seconds = _REFUSED_SECONDS if is_gone else timing.join_seconds
            raise RankError(
                f"rank {job.rank} could not reach rank 0 within {seconds:g} s",
                where=tried,
                todo="check that rank 0 runs, and that a firewall lets ranks connect to it",
                rank=0,
            )
        SYSTEM_CLOCK.sleep(_RETRY_SECONDS)


def _connect(job: Job, address: Address, seconds: float, check: Callable[[], None]) -> Connection:
    """Connect and prove who this is.

    Raises:
        OSError: Nobody there, or a stranger.
    """
    deadline = SYSTEM_CLOCK.monotonic() + seconds
    end = socket.create_connection(address, timeout=max(0.01, seconds))
    try:
        prepare(end)
        theirs = _read_exactly(end, GREETING_NBYTES, deadline, check)
        greeting = parse_greeting(theirs)
        if greeting is None:
            raise ConnectionRefusedError("not a rank of ckstore")
        ours = new_greeting(__version__)
        claim = new_claim(job.token, theirs, ours, job.rank, job.world)
        end.sendall(claim)
        if not is_answer(job.token, theirs, claim, _read_exactly(end, PROOF_NBYTES, deadline, check)):
            raise ConnectionRefusedError("not rank 0 of this job")
        if greeting.version != PROTOCOL_VERSION:
            raise version_error(job.rank, PROTOCOL_VERSION, __version__, greeting.version, greeting.release)
        connection = Connection(end, "rank 0", TO_RANK, SYSTEM_CLOCK.monotonic())
        _read_welcome(connection, deadline)
        return connection
    except BaseException:
        end.close()
        raise


def _read_exactly(end: socket.socket, count: int, deadline: float, check: Callable[[], None]) -> bytes:
    content = b""
    while len(content) < count:
        left = deadline - SYSTEM_CLOCK.monotonic()
        end.settimeout(min(max(0.01, left), _CHECK_SECONDS))
        try:
            received = end.recv(count - len(content))
        except TimeoutError:
            # A process that is stopped accepts connections, and does not answer.
            if left <= _CHECK_SECONDS:
                raise
            check()
            continue
        if not received:
            raise ConnectionAbortedError("the connection was closed: another token, or not rank 0")
        content += received
    return content


def _read_welcome(connection: Connection, deadline: float) -> None:
    waiting = poll()
    waiting.register(connection.end, POLLIN)
    while (left := deadline - SYSTEM_CLOCK.monotonic()) > 0:
        if not waiting.poll(left * 1000):
            break
        messages = connection.receive(SYSTEM_CLOCK.monotonic())
        if messages and isinstance(messages[0], Refused):
            error = restored_error(messages[0].error, source="rank 0", other=RankError)
            raise error if isinstance(error, CkstoreError) else RankError(str(error))
        if messages and isinstance(messages[0], Welcome):
            connection.early, connection.nonce = messages[1:], messages[0].nonce
            return
        if connection.is_ended:
            raise ConnectionAbortedError("the connection was closed")
    raise TimeoutError("no answer")
