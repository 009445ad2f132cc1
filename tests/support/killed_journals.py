"""Runs with a journal whose trainers and savers are killed at random moments, and what they leave.

``python -m support.killed_journals LANES FOLDER`` reads one JSON ``Run`` per line and prints one JSON result per line.
torch and ckstore are imported once, and trainers and savers are forks, so a kill takes a fraction of a second. They run
the real code. A trainer asks the runner for its savers, because a fork of its own would copy its threads.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

STEPS = 30
"""Steps of a whole run."""

KILLS = 4
"""Processes, or groups of processes, that are killed in a run."""

BEHIND_MAX = 2
"""A run resumes at most so many steps behind the last one that was begun."""

FAULT_STEP = 4
"""A run without a protection is killed when this step has been committed."""

END_SECONDS = 150.0
"""When every process must have ended."""

VICTIMS = (
    *[("trainer",)] * 4,
    *[("journal",), ("commits",), ("journal", "trainer"), ("commits", "trainer"), ("journal", "commits", "trainer")],
)
EVENTS = ("opened", "restored", *["begun", "called", "promised", "durable"] * 3)


@dataclass(frozen=True)
class Run:
    """A run with kills.

    Args:
        seed: Decides what is killed, and when.
        fault: A protection that is taken away: ``cuts records`` or ``forgets promises``. Empty: none.
    """

    seed: int
    fault: str = ""


@dataclass(frozen=True)
class Strike:
    """What is killed, and when: ``delay`` seconds after an event has occurred ``count`` times in a trainer's life."""

    victims: tuple[str, ...]
    event: str
    count: int
    delay: float

    @property
    def ends_life(self):
        return "trainer" in self.victims


def strikes_of(run):
    """Return the strikes of a run, in order."""
    if run.fault:
        event = {"cuts records": "durable", "forgets promises": "promised"}[run.fault]
        return [Strike(("trainer",), event, FAULT_STEP, 0.0)]
    choice = random.Random(f"strikes {run.seed}")
    found = []
    for _ in range(KILLS):
        event = choice.choice(EVENTS)
        count = 1 if event in ("opened", "restored") else choice.randint(1, STEPS // (KILLS + 1))
        delay = choice.choice([0.0, choice.expovariate(1 / 0.002), choice.expovariate(1 / 0.02)])
        found.append(Strike(choice.choice(VICTIMS), event, count, delay))
    return found


class Training:
    """A training with everything that a state has. Its batch is chosen by a position."""

    def __init__(self):
        import torch

        torch.manual_seed(0)
        nn = torch.nn
        layers = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24)
        self.model = nn.Sequential(nn.Embedding(64, 24), *layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.position = 0
        self._data = torch.randint(0, 64, (512,), generator=torch.Generator().manual_seed(7))

    @property
    def state(self):
        import torch

        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        return {**parts, "random": torch.get_rng_state(), "position": self.position}

    def train(self):
        tokens = self._data[self.position * 8 % 512 :][:8]
        (self.model(tokens) - 1).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.position += 1

    def resume(self, store):
        """Restore the newest state, if there is one."""
        import torch

        if store.latest() is not None:
            restored = store.restore(into=self.state)
            torch.set_rng_state(restored["random"])
            self.position = restored["position"]


def digest_of(state):
    """Return a text that differs if one bit of a state differs."""
    from ckstore.format.tree import encode_tree
    from ckstore.state.capture import capture, loaded_adapters

    captured = capture(state, loaded_adapters())
    digest = hashlib.blake2b(encode_tree(captured.tree), digest_size=8)
    for storage in captured.storages:
        digest.update(storage.read(0, storage.nbytes))
    return digest.hexdigest()


# In the processes of a run


class Wire:
    """A trainer's connection to the runner."""

    def __init__(self, end):
        self._end = end
        self._role = ""

    def tell(self, event, **facts):
        with contextlib.suppress(OSError):
            self._end.send(json.dumps({"event": event, **facts}).encode())

    def note_role(self, start):
        def noted(*args, role="commits", **options):
            self._role = role
            return start(*args, role=role, **options)

        return noted

    def start_python(self, arguments, *, fds, **options):
        from support.rank_processes import LentSaver

        own, answer = socket.socketpair()
        with own, answer:
            message = json.dumps({"event": "saver", "role": self._role}).encode()
            socket.send_fds(self._end, [message], [answer.fileno(), *fds])
            return LentSaver(int(own.recv(32)))


def be_trainer(place, seed, wire, *, waits):
    """Resume, train to the end, commit each step, and report everything."""
    import ckstore
    from ckstore.background import client
    from ckstore.errors import CkstoreError

    client.start_python = wire.start_python
    client.Saver.start = wire.note_role(client.Saver.start)
    choice = random.Random(seed)
    training = Training()
    with ckstore.open(place, policy=ckstore.Policy(threads=1)) as store:
        wire.tell("opened")
        store.journal(training.optimizer, keyframe_every=choice.choice([5, 11, 100]))
        training.resume(store)
        wire.tell("restored", step=training.position, digest=digest_of(training.state))
        while training.position < STEPS:
            wire.tell("begun", step=training.position + 1)
            training.train()
            step = training.position
            for attempt in itertools.count(1):
                try:
                    pending = store.commit_async(training.state, step)
                    break
                except CkstoreError as error:
                    wire.tell("refused", step=step, text=f"{type(error).__name__}: {error}")
                    if attempt == 4:
                        raise
            pending.when_done(lambda done, step=step: note_end(wire, done, step))
            wire.tell("called", step=step)
            if waits and pending.wait_staged():
                wire.tell("promised", step=step)
        with contextlib.suppress(CkstoreError):
            store.wait()
    wire.tell("ended", digest=digest_of(training.state))


def note_end(wire, done, step):
    wire.tell("failed" if done.error_or_none() else "durable", step=step)


def be_saver(fds, fault):
    if fault == "forgets promises":
        from ckstore.background.saver.journal import JournalCommitter
        from ckstore.background.saver.staged_state import Ticket

        Ticket.is_given_up = property(lambda ticket: ticket.is_aborted or ticket._monitor.is_trainer_gone)
        commit = JournalCommitter.commit

        def commit_later(self, ticket):
            deadline = time.monotonic() + END_SECONDS / 2
            while (
                ticket.head.step == FAULT_STEP and not ticket._monitor.is_trainer_gone and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            return commit(self, ticket)

        JournalCommitter.commit = commit_later
    from ckstore.processes import JOB_SIGNALS

    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    importlib.import_module("ckstore.background.saver.__main__").main(fds)


# In the runner


class Life:
    """The life of one trainer and its savers.

    Args:
        run: The run.
        place: The store.
        seed: Decides what the trainer does that users do in different ways.
        strikes: What is killed, in order; the last one may end the life.
        output: Where the output of the processes goes.
    """

    def __init__(self, run, place, seed, strikes, output):
        self._run, self.strikes, self._output = run, list(strikes), output
        self.struck = []
        self.steps = {"begun": 0, "promised": 0, "durable": 0}
        self.durable, self.refusals, self.savers = [], [], {}
        self.restored = self.ended = None
        self._counts = {}
        self._due = None
        self._end, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waits = any(strike.event == "promised" for strike in strikes)

        def body():
            self._end.close()
            be_trainer(place, seed, Wire(end), waits=waits)

        self._trainer = self._fork(body)
        end.close()

    def _fork(self, body):
        from support.rank_processes import fork

        return fork(body, self._output)

    def serve(self):
        """Serve the trainer until it has ended, with all strikes; return what went wrong."""
        deadline = time.monotonic() + END_SECONDS
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        is_open = True
        while is_open:
            now = time.monotonic()
            if now > deadline:
                os.kill(self._trainer, signal.SIGKILL)
                os.waitpid(self._trainer, 0)
                return [f"the trainer did not end: {self.steps}"]
            seconds = deadline - now if self._due is None else max(0.0, self._due - now)
            if self._due is not None and now >= self._due:
                self._strike()
            elif poll.poll(1000 * min(seconds, 0.02)):
                is_open = self._receive()
            self._reap()
        status = os.waitstatus_to_exitcode(os.waitpid(self._trainer, 0)[1])
        self._end.close()
        is_killed = any(strike.ends_life for strike in self.struck)
        return [] if is_killed or not status else [f"the trainer ended with {status}"]

    def _reap(self):
        """Reap savers that have ended: a trainer waits until they are gone."""
        for role, pid in list(self.savers.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.savers[role]

    def _receive(self):
        try:
            content, fds, _, _ = socket.recv_fds(self._end, 1 << 16, 8)
        except OSError:
            return False
        if not content:
            return False
        message = json.loads(content)
        event, step = message["event"], message.get("step", 0)
        if event == "saver":
            self._lend(message["role"], fds)
            return True
        if event in self.steps:
            self.steps[event] = max(self.steps[event], step)
        if event == "durable":
            self.durable.append(step)
        elif event == "refused":
            self.refusals.append(message["text"])
        elif event == "restored":
            self.restored = step, message["digest"]
            self.steps["begun"] = step
        elif event == "ended":
            self.ended = message["digest"]
        self._counts[event] = self._counts.get(event, 0) + 1
        self._plan_strike()
        return True

    def _plan_strike(self):
        if self._due is None and self.strikes:
            strike = self.strikes[0]
            if self._counts.get(strike.event, 0) >= strike.count:
                self._due = time.monotonic() + strike.delay
                if not strike.delay:
                    self._strike()

    def _strike(self):
        strike = self.strikes.pop(0)
        self._due = None
        pids = {**self.savers, "trainer": self._trainer}
        victims = tuple(victim for victim in strike.victims if victim in pids)
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        if victims:
            self.struck.append(replace(strike, victims=victims))
        # The next one counts from here.
        self._counts.clear()

    def _lend(self, role, fds):
        answer, *rest = fds

        def body():
            self._end.close()
            os.close(answer)
            be_saver(rest, self._run.fault)

        pid = self._fork(body)
        os.write(answer, str(pid).encode())
        for fd in fds:
            os.close(fd)
        self.savers[role] = pid

    @property
    def has_lost_savers(self):
        return any(strike.victims != ("trainer",) for strike in self.struck)


def wait_for_children():
    """Wait until all savers have ended; return what went wrong."""
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)
        except ChildProcessError:
            return []
    return ["a saver did not end"]


def check_start(life, before, durable, expected):
    """Return what is wrong with the state that a trainer has resumed.

    Args:
        life: The life of that trainer.
        before: The life before it.
        durable: Steps with receipts, of all lives before.
        expected: The digests of the run that was never killed.
    """
    if life.restored is None:
        return []
    step, digest = life.restored
    problems = [] if digest == expected[step] else [f"step {step} has other bits"]
    if step < max(durable, default=0):
        problems.append(f"step {max(durable)} has a receipt, and step {step} was restored")
    begun, promised = before.steps["begun"], before.steps["promised"]
    if step < begun - BEHIND_MAX:
        problems.append(f"step {begun} had begun, and step {step} was restored")
    if step < promised and not before.has_lost_savers:
        problems.append(f"step {promised} was promised, and step {step} was restored")
    return problems


def check_history(place, steps, expected):
    """Return what is wrong with some steps of a store, each restored into new objects."""
    import ckstore

    problems = []
    with ckstore.open(place, create=False, policy=ckstore.Policy(threads=1)) as store:
        problems += [f"verify: {error}" for error in store.verify(level="decode").damage]
        for step in steps:
            if digest_of(store.restore(step)) != expected[step]:
                problems.append(f"step {step} of the history has other bits")
    return problems


def run_lives(run, folder, expected):
    """Run trainers, one after the other, until one of them reaches the end. Return what was found."""
    from support.rank_processes import in_child

    place = folder / "store"
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    choice = random.Random(f"lives {run.seed}")
    strikes, lives, durable, problems, behind = strikes_of(run), [], set(), [], []
    while not problems and not (lives and lives[-1].ended):
        last = next((number + 1 for number, strike in enumerate(strikes) if strike.ends_life), len(strikes))
        life = Life(run, place, choice.random(), strikes[:last], output)
        problems += life.serve()
        if lives:
            problems += check_start(life, lives[-1], durable, expected)
            behind += [lives[-1].steps["begun"] - life.restored[0]] if life.restored else []
        strikes = [*life.strikes, *strikes[last:]]
        lives.append(life)
        durable |= set(life.durable)
        if run.fault == "cuts records" and life.ended is None:
            problems += wait_for_children()
            cut_record(place, max(life.durable))
        elif choice.random() < 0.5:
            # Else the next trainer starts while savers of this one work.
            problems += wait_for_children()
    problems += wait_for_children()
    if not problems:
        problems += [] if lives[-1].ended == expected[STEPS] else ["the run has ended with other bits"]
        steps = choice.sample(sorted(durable), min(4, len(durable)))
        problems += in_child(lambda: check_history(place, steps, expected), output)
    os.close(output)
    return {
        "problems": problems,
        "kills": ["+".join(strike.victims) for life in lives for strike in life.struck],
        "behind": behind,
        "durable": len(durable),
        "refusals": [text for life in lives for text in life.refusals],
    }


def cut_record(place, step):
    """Cut the newest segment before the record of a step."""
    import ckstore
    from ckstore._testing import repository_of
    from ckstore.store.journals import Journals

    with ckstore.open(place, create=False) as store:
        journal = Journals(repository_of(store).manifests, clock=repository_of(store).clock).read()
        name = list(journal.segments)[-1]
        record = next(each for each in journal.records(name).records if each.head.step == step)
        os.truncate(place / name.path, record.offset)


# In the process that has imported everything


def run_all(lines, lanes, base, expected):
    """Run runs in forked runners, several at a time, and print their results."""
    running = {}
    for line in itertools.chain(lines, [None] * lanes):
        while len(running) >= lanes or (line is None and running):
            pid, _ = os.waitpid(-1, 0)
            report(*running.pop(pid))
        if line is not None:
            run = Run(**json.loads(line))
            folder = base / f"{time.monotonic_ns()}"
            folder.mkdir()
            pid = os.fork()
            if pid == 0:
                run_one(run, folder, expected)
            running[pid] = run, folder


def run_one(run, folder, expected):
    try:
        result = run_lives(run, folder, expected)
    except BaseException:
        result = {"problems": [traceback.format_exc()]}
    try:
        (folder / "result.json").write_text(json.dumps(result))
    finally:
        os._exit(0)


def report(run, folder):
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else {"problems": ["the runner has died"]}
    if result["problems"]:
        result["output"] = (folder / "output.txt").read_text()[-20000:]
    shutil.rmtree(folder)
    print(json.dumps({"run": asdict(run), **result}), flush=True)


def undisturbed(place):
    """Return the digests of a run that is never killed, before the first step and after each one; and all modules."""
    import ckstore

    training = Training()
    digests = [digest_of(training.state)]
    with ckstore.open(place, policy=ckstore.Policy(threads=1)) as store:
        store.journal(training.optimizer)
        for step in range(1, STEPS + 1):
            training.train()
            digests.append(digest_of(training.state))
            if step <= 2:
                store.commit_async(training.state, step).result()
    check_history(place, [1, 2], digests)
    return digests, [name for name in sys.modules if name.startswith(("torch.", "ckstore.", "sympy.", "numpy."))]


def main(lanes, base):
    import torch

    torch.set_num_threads(1)
    for name in ("saver.__main__", "saver.journal", "saver.committer", "journal", "trainer"):
        importlib.import_module(f"ckstore.background.{name}")
    # An optimizer imports it for its first step.
    importlib.import_module("torch._dynamo")
    from support.rank_processes import in_child

    log = os.open(base / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    expected, modules = in_child(lambda: undisturbed(base / "undisturbed"), log)
    for name in modules:
        # Else every fork would import them again.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    run_all(sys.stdin, lanes, base, expected)


def results_of(runs, base, *, lanes):
    """Run runs in another process. Return their results."""
    command = [sys.executable, "-m", "support.killed_journals", str(lanes), str(base)]
    lines = "".join(json.dumps(asdict(run)) + "\n" for run in runs)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=lines, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
