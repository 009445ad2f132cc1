"""The thread that owns a rank's connections, its heartbeats and its state machines.

On rank 0 it accepts the other ranks; elsewhere it has one connection. All sockets are non-blocking, so a stopped peer
delays nobody. Callers pass events through a queue, and receive actions through one box for each commit or question.

Invariants:
- Only this thread touches the sockets, ``Member`` and ``Coordinator``.
- A peer from which no byte arrives for ``silent_seconds`` is lost, and so is one that sends something invalid. Time in
  which this thread could not run does not count, so a job that was suspended as a whole goes on.
- A stranger, who does not know the token, costs one socket for ``handshake_seconds``. Their number is limited.
- When the thread ends, for whatever reason, every commit and question of this rank gets its answer.
- A forked child closes its copies of all descriptors, and does nothing else with them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ckstore import __version__
from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import log_safely
from ckstore.errors import CkstoreError, RankError, UsageError
from ckstore.format.error_records import ErrorRecord, record_of
from ckstore.processes import close_in_children, keep_in_children
from ckstore.ranks.actions import COMMIT_AGAIN, START_AGAIN, Action, Decide, Finish, Send
from ckstore.ranks.connection import Connection, prepare
from ckstore.ranks.handshake import CLAIM_NBYTES, Claim, answer_to, check_claim, new_greeting
from ckstore.ranks.member import Member
from ckstore.ranks.messages import (
    PROTOCOL_VERSION,
    TO_RANK,
    TO_RANK_0,
    Agreed,
    AllStaged,
    Asked,
    Awaited,
    Beat,
    Begin,
    Bye,
    Content,
    Message,
    More,
    Part,
    Refused,
    SaverLost,
    Welcome,
    Write,
    version_error,
)
from ckstore.ranks.protocol import JOIN_SECONDS, Coordinator

_log = logging.getLogger("ckstore")

Key = int | tuple[str, int]
"""What a caller waits for: the number of a commit, or topic and number of a question."""

_TICK_SECONDS = 0.5
_STRANGERS_MIN = 64
_ACCEPT_AGAIN_SECONDS = 1.0
_PAUSE_SECONDS_MIN = 1.0


class Timing(NamedTuple):
    """How long things may take, in seconds.

    Args:
        join_seconds: For a rank to connect, and to take part in a commit.
        beat_seconds: Between two heartbeats.
        silent_seconds: Without a byte from a peer, until it is lost.
        handshake_seconds: For a new connection to prove that it belongs to the job.
        close_seconds: For the last messages, when the link is closed.
    """

    join_seconds: float = JOIN_SECONDS
    beat_seconds: float = 3.0
    silent_seconds: float = 15.0
    handshake_seconds: float = 10.0
    close_seconds: float = 2.0


class Job(NamedTuple):
    """Who this rank is, and the secret of the job."""

    rank: int
    world: int
    token: bytes
    past: Mapping[bytes, CkstoreError] | None = None
    """Savers, which connect again after a loss: tokens of earlier connections, and how those ended. Rank 0 tells a rank
    that is late. None: a lost rank does not come back."""


class _RunningClock:
    """Seconds in which this thread could run. After a pause of the whole job, nobody has been silent.

    Args:
        pause_seconds: A longer time between two turns of the loop is a pause: the process was stopped, or another
            thread did not release the GIL.
    """

    def __init__(self, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._paused = 0.0
        self._read_at = self.now = SYSTEM_CLOCK.monotonic()

    def advance(self) -> float:
        """Read the clock. ``now`` is the result until the next call."""
        read_at = SYSTEM_CLOCK.monotonic()
        elapsed, self._read_at = read_at - self._read_at, read_at
        if elapsed > self._pause_seconds:
            self._paused += elapsed
        self.now = read_at - self._paused
        return self.now


class _Guest:
    """A new connection that has not proved yet that it belongs to the job."""

    def __init__(self, end: socket.socket, name: str, deadline: float) -> None:
        self.end = end
        self.name = name
        self.deadline = deadline
        self.greeting = new_greeting(__version__)
        self.content = b""


class IoLoop:
    """Connections and state machines of one rank. ``run`` is the body of its thread.

    Args:
        job: The job.
        timing: How long things may take.
        listener: Rank 0: the socket on which it accepts the others. It belongs to the loop from now on.
        connection: Other ranks: the connection to rank 0.
    """

    def __init__(
        self, job: Job, timing: Timing, *, listener: socket.socket | None = None, connection: Connection | None = None
    ) -> None:
        self.boxes: dict[Key, SimpleQueue[Action]] = {}
        """Where callers find the actions for each commit and question. They add and remove the entries."""
        self.asked: dict[str, int] = {}
        """Topics of questions that other ranks ask, and the newest number."""
        self.losses: dict[int, str] = {}
        """Peers that were lost, the first one first, and how. They do not come back."""
        self.on_lost: list[Callable[[int, str], None]] = []
        """Called on the thread of the loop for each of them."""
        self.failed: set[Key] = set()
        """Commits that have failed. Callers remove the entries."""
        self.refusal: CkstoreError | None = None
        """Rank 0: the error for a rank that connects now. None: it may join."""
        self.on_all_staged: Callable[[int], None] | None = None
        """Called on the thread of the loop with the number of a commit of which all ranks are staged."""
        self.repliers: dict[str, Callable[[], None]] = {}
        """Called on the thread of the loop when another rank asks about this topic."""
        self.deciders: dict[str, Callable[[tuple[bytes, ...]], bytes]] = {}
        """Rank 0: answer questions about these topics on the thread of the loop."""
        self.declined: set[int] = set()
        """Commits of the others that this rank has failed without taking part in them."""
        self.watchers: dict[str, Callable[[Awaited | SaverLost], ErrorRecord | None]] = {}
        """Called on the thread of the loop if ranks wait in a commit of this handle, or have lost their saver there."""
        self.nonce = os.urandom(16) if connection is None else connection.nonce
        """Makes the ids of this job's commits different from those of all others. Rank 0 chooses it."""
        self._job, self._timing = job, timing
        self._tick_seconds = min(_TICK_SECONDS, timing.beat_seconds / 4)
        after_loss = START_AGAIN if job.past is None else COMMIT_AGAIN
        self._member = Member(job.rank, after_loss=after_loss)
        self._coordinator = Coordinator(job.world, join_seconds=timing.join_seconds, after_loss=after_loss)
        """Used on rank 0 only."""
        self._commands: SimpleQueue[Callable[[], list[Action]]] = SimpleQueue()
        self._is_stopping = self._has_ended = self._has_parted = False
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not closed before, because another thread may be about to write to this number.
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._listener, self._is_listening, self._accept_again = listener, False, 0.0
        self._peers: dict[int, Connection] = {}
        self._guests: dict[int, _Guest] = {}
        self._unsent: set[int] = set()
        self._clock = _RunningClock(max(_PAUSE_SECONDS_MIN, timing.beat_seconds))
        self._next_check = 0.0
        self._has_logged_stranger = self._has_logged_limit = False
        if listener is not None:
            listener.setblocking(False)
        if connection is not None:
            self._add_peer(0, connection)
        close_in_children(self)

    # For other threads

    def post(self, event: Callable[[Member], list[Action]]) -> None:
        """Pass an event to this rank's state machine."""
        self._command(lambda: event(self._member))

    def has_seen(self, number: int) -> bool:
        """Rank 0: whether a rank has taken part in a commit."""
        return self._coordinator.has_seen(number)

    def lead(self, event: Callable[[Coordinator], list[Action]]) -> None:
        """Rank 0: pass an event to the state machine for all ranks."""
        self._command(lambda: event(self._coordinator))

    def stop(self) -> None:
        """Make ``run`` send what is queued, and return."""
        self._is_stopping = True
        self._wake()

    def _command(self, command: Callable[[], list[Action]]) -> None:
        self._commands.put(command)
        self._wake()
        if self._has_ended:
            self._run_commands()

    def _wake(self) -> None:
        # If this is interrupted, the loop finds the command at its next tick.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def close_in_child(self) -> None:
        """Close the copies of a forked child. No shutdown: that would end the parent's connections."""
        self._is_stopping = True
        ends = [peer.end for peer in list(self._peers.values())] + [guest.end for guest in list(self._guests.values())]
        for end in [*ends, *([] if self._listener is None else [self._listener])]:
            end.close()
        self._selector.close()

    # The thread

    def run(self) -> None:
        """Serve the connections until ``stop`` is called."""
        how = "has lost this rank because of an internal error"
        try:
            while not self._is_stopping:
                self._turn()
            how = "is not reachable, because this rank has closed its store"
            self._part()
        except Exception:
            log_safely(_log, logging.ERROR, "the connection between ranks failed: report this", exc_info=True)
        finally:
            self._close(how)

    def _turn(self) -> None:
        events = self._selector.select(self._tick_seconds)
        now = self._clock.advance()
        for key, mask in events:
            if key.fd == self._wake_fd:
                self._drain_wakes()
            elif self._listener is not None and key.fileobj is self._listener:
                self._accept(now)
            elif (guest := self._guests.get(key.fd)) is not None:
                self._read_guest(guest, now)
            else:
                self._serve_peer(key.data, mask, now)
        self._run_commands()
        if now >= self._next_check:
            self._next_check = now + self._tick_seconds
            self._check_time(now)
        if self.losses and self._job.past is not None and self._job.rank == 0 and self._coordinator.is_idle:
            self._tell_of_loss()
        self._send_queued(now)

    def _tell_of_loss(self) -> None:
        """Savers: say goodbye after a loss, so that all of them connect again for the next commit."""
        if not self._has_parted:
            self._has_parted = True
            for rank, peer in self._peers.items():
                peer.queue(Bye(self._coordinator.first_loss))
                self._unsent.add(rank)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _run_commands(self) -> None:
        # Not until the queue is empty: other threads may fill it as quickly.
        for _ in range(self._commands.qsize()):
            # After the end, several threads may do this.
            with contextlib.suppress(Empty):
                self._do(self._commands.get_nowait()())

    # State machines

    def _do(self, actions: Iterable[Action]) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            if not isinstance(action, Send):
                self._deliver(action)
            elif action.rank != self._job.rank:
                todo.extend(self._queue(action.rank, action.message))
            elif isinstance(action.message, TO_RANK):
                todo.extend(self._member.received(action.message))
            else:
                todo.extend(self._coordinator.received(0, action.message, self._clock.now))

    def _deliver(self, action: Action) -> None:
        assert not isinstance(action, Send)
        if isinstance(action, Asked):
            self.asked[action.topic] = action.number
            if (reply := self.repliers.get(action.topic)) is not None:
                reply()
            return
        if isinstance(action, Decide) and (decide := self.deciders.get(action.topic)) is not None:
            self._do(self._coordinator.decided(action.topic, action.number, decide(action.values)))
            return
        if isinstance(action, (Awaited, SaverLost)):
            record = self.watchers[action.handle](action) if action.handle in self.watchers else None
            if record is not None and isinstance(action, Awaited):
                self.declined.add(action.number)
                self._do(self._member.abort(action.number, action.step, record))
            return
        if isinstance(action, AllStaged):
            if self.on_all_staged is not None:
                self.on_all_staged(action.number)
            return
        key: Key = (action.topic, action.number) if isinstance(action, (Decide, Agreed)) else action.number
        box = self.boxes.get(key)
        # Without a box, the caller has stopped waiting.
        if box is not None:
            if isinstance(action, Finish) and action.error is not None:
                self.failed.add(key)
            box.put(action)

    def _queue(self, rank: int, message: Message) -> list[Action]:
        """Queue a message for a peer. If it cannot be encoded, the commit fails."""
        peer = self._peers.get(rank)
        if peer is None:
            return []
        try:
            peer.queue(message)
        except CkstoreError as error:
            if isinstance(message, (Begin, Content, Part)):
                return self._member.abort(message.number, 0, record_of(error))
            if isinstance(message, (Write, More)):
                return self._coordinator.failed(message.number, record_of(error))
            return self._lost(rank, f"cannot be sent a message ({error})")
        self._unsent.add(rank)
        return []

    def _lost(self, rank: int, how: str, *, is_orderly: bool = False) -> list[Action]:
        if not self.losses and self._job.past is None and not is_orderly:
            text = "rank %d %s: commits fail from now on. %s"
            log_safely(_log, logging.WARNING, text, rank, how, START_AGAIN.capitalize())
        self.losses.setdefault(rank, how)
        for call in list(self.on_lost):
            call(rank, how)
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._unsent.discard(rank)
            self._selector.unregister(peer.end)
            peer.end.close()
        return self._coordinator.lost(rank, how) if self._job.rank == 0 else self._member.lost(how)

    # Peers

    def _add_peer(self, rank: int, peer: Connection) -> None:
        self._peers[rank] = peer
        self._selector.register(peer.end, selectors.EVENT_READ, rank)
        self._unsent.add(rank)
        for message in peer.early:
            self._take(rank, message, peer.heard)

    def _serve_peer(self, rank: int, mask: int, now: float) -> None:
        peer = self._peers.get(rank)
        if peer is None:
            return
        if mask & selectors.EVENT_WRITE:
            self._unsent.add(rank)
        if not mask & selectors.EVENT_READ:
            return
        try:
            messages = peer.receive(now)
        except CkstoreError as error:
            self._do(self._lost(rank, f"sent something that this rank cannot read ({error})"))
            return
        except OSError as error:
            self._do(self._lost(rank, f"closed its connection ({error.strerror or error})"))
            return
        for message in messages:
            if self._peers.get(rank) is not peer:
                return
            self._take(rank, message, now)
        if peer.is_ended and self._peers.get(rank) is peer:
            self._do(self._lost(rank, "closed its connection"))

    def _take(self, rank: int, message: Message, now: float) -> None:
        if isinstance(message, Bye):
            why = f", after {message.why}" if message.why else ""
            self._do(self._lost(rank, f"has ended or closed its store{why}", is_orderly=not why))
        elif self._job.rank == 0:
            self._do(self._coordinator.received(rank, message, now))
        else:
            self._do(self._member.received(message))

    def _send_queued(self, now: float) -> None:
        while self._unsent:
            rank = self._unsent.pop()
            peer = self._peers.get(rank)
            if peer is None:
                continue
            try:
                peer.send(now)
            except OSError as error:
                self._do(self._lost(rank, f"closed its connection ({error.strerror or error})"))
                continue
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.is_sending else 0)
            self._selector.modify(peer.end, mask, rank)

    def _check_time(self, now: float) -> None:
        for rank, peer in list(self._peers.items()):
            if now - peer.heard >= self._timing.silent_seconds:
                self._do(self._lost(rank, f"has been silent for {self._timing.silent_seconds:g} s"))
            elif now - peer.sent >= self._timing.beat_seconds and not peer.is_sending:
                peer.queue(Beat())
                self._unsent.add(rank)
        for guest in [guest for guest in self._guests.values() if now >= guest.deadline]:
            self._dismiss(guest)
        if self._listener is not None:
            if not self._is_listening and now >= self._accept_again:
                self._selector.register(self._listener, selectors.EVENT_READ)
                self._is_listening = True
            self._do(self._coordinator.tick(now))

    # New connections

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        try:
            end, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            self._pause_accepting(error, now)
            return
        end.setblocking(False)
        prepare(end)
        guest = _Guest(end, str(address[0]), now + self._timing.handshake_seconds)
        if len(self._guests) >= max(_STRANGERS_MIN, 2 * self._job.world):
            self._dismiss(next(iter(self._guests.values())))
        self._guests[end.fileno()] = guest
        self._selector.register(end, selectors.EVENT_READ)
        try:
            end.send(guest.greeting, socket.MSG_NOSIGNAL)
        except OSError:
            self._dismiss(guest)

    def _pause_accepting(self, error: OSError, now: float) -> None:
        """Ranks connect again until their time is over, and descriptors may become free."""
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._is_listening, self._accept_again = False, now + _ACCEPT_AGAIN_SECONDS
        if not self._has_logged_limit:
            self._has_logged_limit = True
            text = "rank 0 cannot accept another rank (%s). Raise the limit of open files (ulimit -n)"
            log_safely(_log, logging.WARNING, text, error.strerror or error)

    def _read_guest(self, guest: _Guest, now: float) -> None:
        try:
            received = guest.end.recv(CLAIM_NBYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        guest.content += received
        if received and len(guest.content) < CLAIM_NBYTES:
            return
        known = self._claim_of(guest)
        if known is None:
            self._dismiss(guest)
            return
        claim, token, error = known
        self._forget(guest)
        source = f"rank {claim.rank} ({guest.name})"
        peer = Connection(guest.end, source, TO_RANK_0, now)
        peer.queue_bytes(answer_to(token, guest.greeting, guest.content))
        error = error or self._refusal(claim)
        if error is None:
            peer.queue(Welcome(self.nonce))
            self._add_peer(claim.rank, peer)
            self._do(self._coordinator.joined(claim.rank))
            return
        peer.queue(Refused(record_of(error)))
        # Short enough for the buffer of a new socket.
        with contextlib.suppress(OSError):
            peer.send(now)
        peer.end.close()
        if claim.version != PROTOCOL_VERSION:
            self._do(self._coordinator.lost(claim.rank, _without_rank(error.what)))

    def _claim_of(self, guest: _Guest) -> tuple[Claim, bytes, CkstoreError | None] | None:
        """Return what a guest claims, its token, and why it is too late if that is an earlier one."""
        if len(guest.content) != CLAIM_NBYTES:
            return None
        for token, error in ((self._job.token, None), *(self._job.past or {}).items()):
            claim = check_claim(token, guest.greeting, guest.content)
            if claim is not None:
                return claim, token, error
        return None

    def _refusal(self, claim: Claim) -> CkstoreError | None:
        rank, world = claim.rank, self._job.world
        if claim.version != PROTOCOL_VERSION:
            return version_error(rank, claim.version, claim.release, PROTOCOL_VERSION, __version__)
        if claim.world != world or not 0 < rank < world:
            what = f"rank {rank} of {claim.world} connected to a job of {world} ranks"
            return UsageError(what, todo="pass the same world on every rank", rank=rank)
        if self.refusal is not None:
            return self.refusal
        if self._job.past is not None and self.losses:
            what = f"{self._coordinator.first_loss}: the commit failed on all ranks"
            return RankError(what, todo="commit again", rank=self._coordinator.first_lost)
        if rank in self._peers:
            return UsageError(f"rank {rank} is connected already", todo="give every process its own rank", rank=rank)
        if (how := self._coordinator.how_lost(rank)) is not None:
            return RankError(f"rank {rank} {how}, and cannot come back", todo="start the whole job again", rank=rank)
        return None

    def _dismiss(self, guest: _Guest) -> None:
        """Close the connection of a stranger."""
        self._forget(guest)
        guest.end.close()
        if not self._has_logged_stranger:
            self._has_logged_stranger = True
            text = "closed a connection from %s to rank 0 that is not from this job. Further ones are not logged"
            log_safely(_log, logging.WARNING, text, guest.name)

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.end.fileno()]
        self._selector.unregister(guest.end)

    # The end

    def _part(self) -> None:
        """Send what is queued and Bye, and wait briefly until the others have received it."""
        self._run_commands()
        deadline = SYSTEM_CLOCK.monotonic() + self._timing.close_seconds
        for rank, peer in self._peers.items():
            peer.queue(Bye(self._coordinator.first_loss))
            self._unsent.add(rank)
        is_open = set(self._peers)
        while self._peers and (now := SYSTEM_CLOCK.monotonic()) < deadline:
            self._send_queued(now)
            for rank in [rank for rank in is_open if rank in self._peers and not self._peers[rank].is_sending]:
                is_open.remove(rank)
                with contextlib.suppress(OSError):
                    self._peers[rank].end.shutdown(socket.SHUT_WR)
            # Closing a socket with unread bytes would discard what the other side has not read yet.
            for key, _ in self._selector.select(max(0.0, deadline - now)):
                self._drain(key)

    def _drain(self, key: selectors.SelectorKey) -> None:
        if key.fd == self._wake_fd:
            self._drain_wakes()
            return
        if not isinstance(key.data, int):
            self._selector.unregister(key.fileobj)
            return
        peer = self._peers[key.data]
        try:
            is_ended = not peer.end.recv(1 << 20)
        except BlockingIOError:
            self._unsent.add(key.data)
            return
        except OSError:
            is_ended = True
        if is_ended:
            del self._peers[key.data]
            self._selector.unregister(peer.end)
            peer.end.close()

    def _close(self, how: str) -> None:
        keep_in_children(self)
        for peer in self._peers.values():
            peer.end.close()
        for guest in self._guests.values():
            guest.end.close()
        if self._listener is not None:
            self._listener.close()
        self._peers.clear()
        self._guests.clear()
        self._do(self._member.lost(how))
        # Events that were posted meanwhile are answered here, later ones by the thread that posts them.
        self._has_ended = True
        self._run_commands()
        self._selector.close()


def _without_rank(what: str) -> str:
    """Return a sentence about ``rank 3`` without its subject."""
    return what.split(" ", 2)[-1]
