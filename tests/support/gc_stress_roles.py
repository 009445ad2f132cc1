"""What each process of the stress test does."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import pkgutil
import random
import signal
import time
import traceback

import numpy as np

import ckstore
import ckstore.ops.gc.run
from ckstore._testing import repository_of
from ckstore.api import Store
from ckstore.errors import CkstoreError, ConflictError, CorruptError, NotFoundError
from ckstore.format import paths
from ckstore.io.local import LocalBackend
from ckstore.ops.gc.policy import Retention
from ckstore.store.refs import load_whole
from support.model import difference

POLICY = ckstore.Policy(threads=1, memory_nbytes_max=64 << 20)
KEPT_LAST, KEPT_EVERY = 6, 25
RETENTION = Retention(keep_last=KEPT_LAST, keep_every=KEPT_EVERY)
KINDS = ("<f4", "<f8", "<i4", "<u1", "<i8", "<f2", "<u2")
"""Small tensors share a chunk with others of their kind, so that each kind is a chunk of its own."""

POOL = 8
"""Values that each kind may have: few, so that bytes that were dropped come again, in any run; and so many that a value
is often in none of the manifests of its run that rules keep, while the run still remembers where it lay."""

BACKLOG_MAX = 10
"""Entries of a run beyond those that retention keeps, at which its writer waits for collectors. A run remembers what
its newest 16 manifests name: were writers further ahead, nothing that is dropped would be used again."""

PATIENCE_SECONDS = 0.5

ERA_STEPS, ERA_SHIFT = 10, 16
"""A part of the state stays for so many steps: what is kept of them needs a little of a pack whose rest is dropped."""

HESITATION_CHANCE, HESITATION_SECONDS_MAX = 0.3, 0.2
"""How often a process is held up where another must not come between, and for how long: what a scheduler does to it on
a busy machine. A storm must not depend on that: small commits are over before a collector has moved a pack."""

PR_SET_PDEATHSIG = 1
TRIES_MAX = 10


def state_of(number):
    """Return the state that a number stands for: most parts from the pool, one of its era, one of its own if odd."""
    rng = random.Random(number)
    state = {}
    for kind in KINDS:
        value = rng.randrange(POOL)
        state[kind[1:]] = np.random.default_rng(value).integers(0, 256, 12_000, dtype=np.uint8).view(kind)
    if number % 2:
        # Large enough that, once it is dropped, its pack is worth rewriting for the parts that others need.
        state["f4"] = np.random.default_rng(number).standard_normal(30_000).astype("<f4")
    era = number >> ERA_SHIFT
    state["i8"] = np.random.default_rng(era).integers(0, 2**62, 1500)
    return {**state, "number": number}


def new_number(run, step, rng):
    """Return what a commit's state is made from: its era, which a few commits in a row have in common, and chance."""
    return (step // ERA_STEPS * 8 + int(run[1:])) << ERA_SHIFT | rng.randrange(1 << ERA_SHIFT)


def hold_up(rng):
    """Have this process held up now and then before a pack leaves its place, or a manifest comes into it.

    The class itself is changed: a collector that sees writers works on a subclass.
    """

    def held_up(whole):
        def method(self, source, target=""):
            is_critical = source.startswith(paths.PACKS_FOLDER) or target.startswith(paths.MANIFESTS_FOLDER)
            if is_critical and rng.random() < HESITATION_CHANCE:
                time.sleep(rng.random() * HESITATION_SECONDS_MAX)
            return whole(self, source, target) if target else whole(self, source)

        return method

    for name in ("link", "rename", "rename_new", "unlink"):
        setattr(LocalBackend, name, held_up(getattr(LocalBackend, name)))


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare(folder):
    """Make a store, and import all that children need, once for all of them."""
    for module in pkgutil.walk_packages(ckstore.__path__, "ckstore."):
        others = ("cli", "background", "integrations", "run", "_native", "__main__", *ckstore._DOORS)
        is_needed = module.name.split(".")[1] not in others
        loads_torch = "torch" in module.name or module.name.startswith("ckstore.ops.interop")
        if is_needed and not loads_torch and module.name != "ckstore.io.uring_engine":
            importlib.import_module(module.name)
    (folder / "acks").mkdir()
    ckstore.open(LocalBackend(folder / "store", engine="pwrite"), policy=POLICY).close()


def open_store(folder, run):
    return ckstore.open(LocalBackend(folder / "store", engine="pwrite"), run=run, create=False, policy=POLICY)


def other_handle(store):
    parts = repository_of(store)
    return Store(type(parts)(parts.backend, parts.record, parts.run, clock=parts.clock), POLICY)


def run(role, index, folder, rng):
    """Play a role until someone ends it; never returns."""
    fd = os.open(folder / "acks" / f"{role}-{index}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(line):
        os.write(fd, f"{line}\n".encode())

    logging.disable(logging.CRITICAL)
    hold_up(random.Random(rng.random()))
    try:
        ROLES[role](folder, f"w{index}", rng, note)
    except BaseException as error:
        note(f"FAIL {role} {index} died: {error!r} {' '.join(traceback.format_tb(error.__traceback__)[-3:])!r}")
    os._exit(0)


# Writers


def write(folder, run, rng, note):
    remove_unacknowledged(folder, run, note)
    while True:
        # A new handle now and then: what it knows it has to learn from the store.
        with open_store(folder, run) as store:
            for _ in range(rng.randrange(5, 60)):
                try:
                    write_once(store, run, rng, note)
                except ConflictError as error:
                    # Packs vanished twice under one commit, or the lease is still held: loud, not lost.
                    note(f"conflict {type(error).__name__} {error.what[:60]!r}")


def remove_unacknowledged(folder, run, note):
    """Clean up like an operator: remove what a killed writer has published or tagged but not verified."""
    acks = (folder / "acks" / f"writer-{run[1:]}").read_text().splitlines()
    acked = {int(line.split()[2]) for line in acks if line.startswith("commit ")}
    tagged = {int(line.split()[2]) for line in acks if line.startswith("tagged ")}
    with open_store(folder, run) as store:
        for tag, seq in store.tags().items():
            # Who sets a tag looks after that whether its checkpoint was dropped meanwhile, and then takes it back.
            if seq not in tagged and is_dropped(store, seq):
                note(f"untagged {run} {seq}")
                store.untag(tag)
        for name in repository_of(store).manifests.listing().names:
            try:
                load_whole(repository_of(store), name, takes_lower=True)
            except NotFoundError:
                continue
            except CorruptError as error:
                if name.seq in acked and not is_dropped(store, name.seq):
                    note(f"FAIL {run} seq {name.seq} was acknowledged: {error!r}")
                note(f"deleting {run} {name.seq}")
                with contextlib.suppress(NotFoundError, ConflictError):
                    store.delete(f"seq:{name.seq}")
                    note(f"removed {run} {name.seq}")


def wait_for_collectors(store):
    """Return the entries of a run, once they are not many more than rules keep, or nothing comes of waiting."""
    # Where a step of the protocol is left out, damage stops every collection of a run before long; the storm goes on.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        names = repository_of(store).manifests.listing().names
        last = max((name.step for name in names), default=0)
        if len(names) <= KEPT_LAST + last // KEPT_EVERY + BACKLOG_MAX or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


def write_once(store, run, rng, note):
    chance, names = rng.random(), wait_for_collectors(store)
    if names and chance < 0.02:
        seq = rng.choice(names).seq
        note(f"deleting {run} {seq}")
        with contextlib.suppress(NotFoundError, ConflictError):
            store.delete(f"seq:{seq}")
            note(f"deleted {run} {seq}")
    elif names and chance < 0.04:
        with contextlib.suppress(NotFoundError, ConflictError):
            name = rng.choice(names)
            store.tag(f"seq:{name.seq}", f"t{rng.randrange(3)}")
            note(f"tagged {run} {name.seq}")
    elif names and chance < 0.05:
        with contextlib.suppress(NotFoundError, ConflictError, CorruptError):
            store.repack()
            note(f"repacked {run} 0")
    elif names and chance < 0.07:
        with contextlib.suppress(NotFoundError, ConflictError, CorruptError):
            # Whatever it meant is dropped, or was torn by a writer that died, or is there.
            state = store.restore(f"seq:{rng.choice(names).seq}")
            note(f"again {run} {store.restored.step}")
            info = store.rewind(f"seq:{store.restored.seq}")
            note(f"commit {run} {info.seq} {info.step} {state['number']}")
    else:
        step = max((name.step for name in names), default=-1) + 1
        number = new_number(run, step, rng)
        receipt = store.commit(state_of(number), step)
        note(f"commit {run} {receipt.seq} {step} {number}")


# Collectors


def collect(folder, run, rng, note):
    # Two of them shall meet.
    ckstore.ops.gc.run.collector_lock = lambda *args, **options: contextlib.nullcontext()
    throttled = ckstore.ops.gc.run.throttled
    while True:
        # Slowly, as where there are writers, or without a pause, as where there are none.
        is_leisurely = rng.random() < 0.3
        ckstore.ops.gc.run.throttled = throttled if is_leisurely else lambda backend, clock: backend
        with open_store(folder, "w0") as store:
            try:
                report = other_handle(store).gc(
                    RETENTION,
                    all_runs=True,
                    now=rng.random() < 0.5,
                    min_age=rng.choice([0, 0.05, 0.3]),
                    trash_for=rng.choice([0, 0.1, 0.5]),
                    waste_max=rng.choice([0.01, 0.25]),
                    repack_nbytes_max=rng.choice([0, 1 << 30]),
                )
            except ConflictError as error:
                note(f"conflict {error.what[:60]!r}")
                continue
            done = report.done
            is_blocked = any(plan.blocked for plan in report.runs)
            counts = len(done.dropped), done.moved_packs, done.freed_files, done.rescued, done.repacked.manifests
            note(f"collected {' '.join(map(str, counts))} {int(is_blocked)}")
            if rng.random() < 0.1:
                undelete_one(other_handle(store), rng, note)


def undelete_one(handle, rng, note):
    dropped = [manifest for entry in handle.trash() for manifest in entry.manifests if manifest[0] == handle.run]
    if dropped:
        run, seq, step, *_ = rng.choice(dropped)
        note(f"again {run} {step}")
        with contextlib.suppress(NotFoundError, CorruptError, ConflictError):
            info = handle.undelete(f"seq:{seq}")
            note(f"undeleted {run} {info.seq}")


# Readers


def read(folder, run, rng, note):
    while True:
        with open_store(folder, f"w{rng.randrange(8)}") as store:
            for _ in range(20):
                names = repository_of(store).manifests.listing().names
                if not names:
                    break
                read_once(store, rng.choice(names).seq, note)
                if rng.random() < 0.3:
                    read_newest(store, note)


def read_once(store, seq, note):
    """Restore one checkpoint: it is right, or dropped; what another replaces just now is there at the next try."""
    error = None
    for _ in range(TRIES_MAX):
        try:
            state = store.restore(f"seq:{seq}")
        except CkstoreError as failure:
            error = failure
            if is_dropped(store, seq):
                return
            continue
        found = difference(state, state_of(state["number"]))
        if found:
            note(f"FAIL reader: {store.run} seq {seq}: {found}")
        note("read")
        return
    # An unacknowledged manifest may be withdrawn while it is read; one in place that cannot be restored is lost.
    if repository_of(store).manifests.is_visible(seq) and not is_dropped(store, seq):
        note(f"unreadable {store.run} {seq} {error!r}"[:300])


def read_newest(store, note):
    with contextlib.suppress(NotFoundError, CorruptError):
        state = store.restore()
        found = difference(state, state_of(state["number"]))
        if found:
            note(f"FAIL reader: newest of {store.run}: {found}")


def is_dropped(store, seq):
    return repository_of(store).backend.stat(paths.drop_mark_name(store.run, seq)) is not None


ROLES = {"writer": write, "collector": collect, "reader": read}
