"""A rank that commits through a link, as a process of its own: the protocol is real, the checkpoint is an empty file.

``main`` prints one JSON line for the outcome of each commit, and ``closed`` at the end.
"""

from __future__ import annotations

import json
import os
import socket
import time

from ckstore.errors import CkstoreError
from ckstore.hashing import digest_of
from ckstore.ranks.actions import Finish, LookUp, Merge, Plan, Publish
from ckstore.ranks.io_loop import Job, Timing
from ckstore.ranks.link import Link
from ckstore.ranks.messages import AllStaged, Begin, More, Wanted, Write

WAIT_SECONDS = 120.0


def commit(link, step, folder, *, pause=lambda phase: None, facts=None):
    """Commit an empty file. Return the action Finish.

    Args:
        link: The link of this rank.
        step: The step.
        folder: The store.
        pause: Called with the name of each phase: begin, write, wait, merge, publish, published.
        facts: What must be equal on all ranks.
    """
    number = link.next_number()
    content = f"layout of rank {link.rank}".encode()
    begin = Begin(number, step, False, facts or {"run": "main"}, (digest_of(content),))
    pause("begin")
    link.send(lambda member: member.begin(begin))
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        action = link.wait(number, deadline - time.monotonic())
        assert action is not None, "no answer for two minutes"
        if isinstance(action, Finish):
            return action
        on_action(link, action, content, folder / str(number), pause)


def on_action(link, action, content, path, pause):
    """Do what an action asks for."""
    number = action.number
    if isinstance(action, Wanted):
        contents = dict.fromkeys(action.digests, content)
        link.send(lambda member: member.contents(number, contents))
    elif isinstance(action, (Write, More)):
        pause("write")
        link.send(lambda member: member.part(number, f"part of rank {link.rank}".encode()))
        pause("wait")
    elif isinstance(action, Plan):
        spans = [f"spans of rank {rank}".encode() for rank in range(link.world)]
        link.lead(lambda coordinator: coordinator.planned(number, spans))
    elif isinstance(action, Merge):
        pause("merge")
        assert len(action.parts) == link.world
        link.lead(lambda coordinator: coordinator.merged(number))
    elif isinstance(action, Publish):
        pause("publish")
        with path.open("x"):
            pause("published")
        link.lead(lambda coordinator: coordinator.published(number, b"receipt %d" % number))
    elif isinstance(action, LookUp):
        is_found = path.exists()
        receipt = b"receipt %d" % number
        link.send(lambda member: member.found(number, receipt) if is_found else member.not_found(number))
    else:
        assert isinstance(action, AllStaged)


def main(rank, world, place, token, folder, *, timing, commits=1, meets=True, pauses=(), go):
    """Run the commits.

    Args:
        rank: This rank.
        world: Number of ranks.
        place: The descriptor on which rank 0 listens; the port to which the others connect.
        token: The secret of the job.
        folder: The store.
        timing: The fields of ``Timing``.
        commits: How many.
        meets: Whether the ranks wait for each other before the first.
        pauses: Phases at which this rank prints ``at PHASE`` and waits for a line.
        go: The descriptor from which it reads these lines.
    """
    pauses, lines = list(pauses), os.fdopen(go)

    def pause(phase):
        if phase in pauses:
            pauses.remove(phase)
            print(f"at {phase}", flush=True)
            lines.readline()

    listener = socket.socket(fileno=place) if rank == 0 else None
    try:
        link = Link(Job(rank, world, token), Timing(**timing), listener=listener, addresses=[("127.0.0.1", place)])
        if meets:
            link.agree("start", b"", lambda _: b"")
    except CkstoreError as error:
        print(json.dumps({"is_done": False, "cause": error.facts.get("rank"), "what": error.what}), flush=True)
        return
    for index in range(commits):
        finish = commit(link, 100 + index, folder, pause=pause)
        what = None if finish.error is None else finish.error.what
        print(json.dumps({"is_done": finish.receipt is not None, "cause": finish.rank, "what": what}), flush=True)
    pause("close")
    link.close()
    lines.close()
    print("closed", flush=True)
