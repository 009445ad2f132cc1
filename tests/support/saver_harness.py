"""A trainer's side of a background commit, by hand: an arena, a saver, and states staged as far as a test wants."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

import ckstore
from ckstore.background.arena import STAGED, UNIT_NBYTES, Arena
from ckstore.background.client import Saver
from ckstore.background.staged_head import HeadWriter, SampleRow
from ckstore.background.tickets import Callbacks
from ckstore.config import MIB, Policy
from ckstore.processes import process_started
from ckstore.state.capture import capture
from support.prepared_trainers import prepared

SOURCE = Path(ckstore.__file__).parent.parent

SECONDS_MAX = 60.0
"""Longer than anything here takes, on a machine that others use too."""


def noise(seed, nbytes=8 * MIB, count=1):
    """Return a state of arrays that do not compress."""
    source = np.random.default_rng(seed)
    return {f"w{index}": source.integers(0, 1 << 32, nbytes // 4, np.uint32) for index in range(count)}


def restored(address, ref=None):
    with ckstore.open(address) as store:
        return store.restore(ref)


def equal(left, right):
    assert left.keys() == right.keys()
    return all(np.array_equal(left[key], right[key]) for key in left)


def packs_nbytes(address):
    """Return how many bytes of packs are not zero: what was written, whatever was reserved."""
    total = 0
    for folder, _, names in os.walk(address):
        for name in names:
            # Drafts come and go while a saver writes.
            with contextlib.suppress(FileNotFoundError):
                path = Path(folder, name)
                total += np.count_nonzero(np.fromfile(path, np.uint8)) if path.stat().st_size > MIB else 0
    return total


def until(has_come, what="it"):
    """Wait for a condition that must come."""
    deadline = time.monotonic() + SECONDS_MAX
    while not has_come():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.005)


def stop(pid):
    """Stop a process, and see that each of its threads stands still: on a busy machine they go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(stats_of(pid, 0)) <= {"T", "t"}, "the stop")


def stats_of(pid, index):
    """Return one field of each thread's ``stat``, from the state on; threads may end meanwhile."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name in brackets may hold anything.
            found.append((task / "stat").read_text().rpartition(")")[2].split()[index])
    return found


def links(pid="self"):
    """Return what the descriptors of a process are; some may be closed meanwhile."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # The one that this folder is read by is gone, too.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(str(path.readlink()))
    return found


def lay_out(arena, ticket, state, step, *, slot=0, metrics=None, tags=(), policy=None, sample=None, share=b""):
    """Give a slot to a ticket, and put the head of a state there, and what is sampled; nothing else is staged.

    ``sample(captured)`` yields keys and bytes that are staged. Return the slot, what was captured, where each storage
    will lie, where the head lies, and how long it is.
    """
    captured = capture(state)
    places, end = [], UNIT_NBYTES
    rows = []
    for (storage, offset, nbytes, width), content in list(sample(captured)) if sample else ():
        rows.append((SampleRow(storage, offset, nbytes, width, end - UNIT_NBYTES, len(content)), content))
        end += len(content)
    end = -(-end // UNIT_NBYTES) * UNIT_NBYTES if rows else 0
    for storage in captured.storages:
        places.append(end)
        end += -(-storage.nbytes // 4096) * 4096
    samples = [row for row, _ in rows]
    facts = {"step": step, "metrics": metrics or {}, "tags": tags, "policy": policy or Policy(), "samples": samples}
    facts["share"] = share
    writer = HeadWriter()
    head = writer.encode(writer.head_of(captured, places, **facts))
    room = arena.slots[slot]
    room.reserve(end + len(head))
    room.start(ticket, end + len(head))
    room.view(end, len(head))[:] = head
    for row, content in rows:
        room.view(row.place, len(content))[:] = content
    if rows:
        room.marks[: -(-(rows[-1][0].place + len(rows[-1][1])) // UNIT_NBYTES)] = 1
    return room, captured, places, end, len(head)


def stage_storages(slot, captured, places, units=None):
    """Copy all storages to their places, or as much as fits into the first units of the slot, and mark these."""
    end = slot.nbytes if units is None else units * UNIT_NBYTES
    for storage, place in zip(captured.storages, places, strict=True):
        nbytes = max(0, min(storage.nbytes, end - place))
        slot.view(place, nbytes)[:] = storage.read(0, nbytes)
    slot.marks[: -(-end // UNIT_NBYTES)] = 1


class InFlightCommit:
    """A ticket, and what became of it."""

    def __init__(self, harness, number, slot, captured, places):
        self.harness, self.number, self.slot = harness, number, slot
        self.captured, self.places = captured, places
        self.events = []
        self.began, self.ended, self.free = threading.Event(), threading.Event(), threading.Event()
        self.kept = threading.Event()
        self.receipt = self.error = None

    def callbacks(self):
        def note(name, event, key=None):
            def call(*facts):
                self.events.append(name)
                if key is not None:
                    setattr(self, key, facts[0])
                event.set()

            return call

        return Callbacks(
            on_done=note("done", self.ended, "receipt"),
            on_failed=note("failed", self.ended, "error"),
            on_free=note("free", self.free),
            on_began=note("began", self.began),
            on_retained=note("kept", self.kept),
        )

    def stage(self, units=None):
        """Copy all storages, or as much as fits into the first units of the slot; mark these, and ring."""
        stage_storages(self.slot, self.captured, self.places, units)
        os.eventfd_write(self.harness.saver.bell, 1)
        return self

    def finish(self):
        """Say that all is staged."""
        self.slot.state = STAGED
        self.harness.saver.staged(self.number)
        os.eventfd_write(self.harness.saver.bell, 1)
        return self

    def wait(self):
        """Wait for the end; return the receipt, or raise the error."""
        assert self.harness.saver.wait(self.free, SECONDS_MAX, "end a test")
        if self.error is not None:
            raise self.error
        return self.receipt


class SaverHarness:
    """What a trainer has."""

    def __init__(self, address, run="main", *, slot_count=1, nice=0, arena=None, stopped_seconds_max=None):
        self.address, self.run, self.nice = str(address), run, nice
        self.stopped_seconds_max = stopped_seconds_max
        self.arena = arena or Arena.create(slot_count=slot_count)
        self.ticket = 0
        self.start()

    def start(self):
        """Start a saver, a new one if there was one."""
        limit = self.stopped_seconds_max
        self.saver = Saver.start(self.address, self.run, self.arena, nice=self.nice, stopped_seconds_max=limit)

    def begin(
        self,
        state,
        step,
        *,
        slot=0,
        metrics=None,
        tags=(),
        policy=None,
        sample=None,
        callbacks=lambda given: given,
        **words,
    ):
        """Hand over a slot without staging anything.

        ``sample(captured)`` yields keys and bytes that are staged; ``callbacks(given)`` returns what is called instead.
        """
        self.ticket += 1
        room, captured, places, place, nbytes = lay_out(
            self.arena,
            self.ticket,
            state,
            step,
            slot=slot,
            metrics=metrics,
            tags=tags,
            policy=policy,
            sample=sample,
        )
        in_flight = InFlightCommit(self, self.ticket, room, captured, places)
        self.saver.begin(self.ticket, slot, place, nbytes, callbacks(in_flight.callbacks()), **words)
        return in_flight

    def commit(self, state, step, **options):
        """Stage a state and wait until it is durable."""
        return self.begin(state, step, **options).stage().finish().wait()

    def close(self):
        """End the saver, whatever it does, and close the arena."""
        if self.saver.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.saver.pid, signal.SIGCONT)
            for number in range(1, self.ticket + 1):
                self.saver.abort(number)
            if not self.saver.quit(SECONDS_MAX):
                os.kill(self.saver.pid, signal.SIGKILL)
                self.saver.quit()
        self.arena.close()


class Child:
    """A trainer in a process of its own: runs code in which ``harness``, ``noise`` and ``say`` are known.

    Args:
        folder: The store, which is there already.
        code: What to run; ``say(text)`` tells the test, and at the end the child sleeps until it is killed.
        has_harness: Whether it has one, with a saver; else the first that its code says is the pid of a saver.
    """

    def __init__(self, folder, code, *, has_harness=True):
        harness = "harness = SaverHarness(folder); say(harness.saver.pid)" if has_harness else ""
        program = f"""
import os, sys, time
from support.saver_harness import *
say = lambda text: os.write(1, f"{{text}}\\n".encode())
folder = {str(folder)!r}
{harness}
{code}
time.sleep(600)
"""
        self._prepared = prepared("support.saver_harness", "ckstore.commit", "ckstore.background.commits")
        (out, theirs_out), (err, theirs_err) = os.pipe(), os.pipe()
        self._out, self._err = os.fdopen(out), os.fdopen(err)
        self.pid = self._prepared.start(program, theirs_out, theirs_err)
        os.close(theirs_out)
        os.close(theirs_err)
        self.saver_pid = int(self.hear())
        self.saver_started = process_started(self.saver_pid)

    def hear(self):
        """Return the next thing the child says."""
        line = self._out.readline()
        assert line, self._err.read()
        return line.strip()

    def kill(self, number=signal.SIGKILL):
        """Kill the child, and see it dead."""
        self._prepared.kill(self.pid, number)
        self._prepared.wait(self.pid)

    @property
    def is_saver_alive(self):
        return self.saver_started is not None and process_started(self.saver_pid) == self.saver_started

    def wait_saver(self):
        """Wait until the saver has ended; return what it wrote to stderr, which is the child's."""
        until(lambda: not self.is_saver_alive, "the end of the saver")

    def close(self):
        """Leave nothing behind; return what was written to stderr."""
        self.kill()
        if self.is_saver_alive:
            os.kill(self.saver_pid, signal.SIGKILL)
            self.wait_saver()
        text = "" if self._err.closed else self._err.read()
        self._out.close()
        self._err.close()
        return text


def fork(child):
    """Run a function in a forked child; return its pid, and what makes it end."""
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        code = 1
        try:
            code = child() or 0
            os.read(go_read, 1)
        finally:
            os._exit(code)
    os.close(go_read)

    def end():
        os.close(go_write)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return pid, end
