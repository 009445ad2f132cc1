"""Every state a power cut can leave of a recorded SimFS.

A cut falls after some step of the record. What was synced by then is there. Of the rest, each name and the bytes
of each file are chosen apart: kept or lost, lost as a hole, torn at a sector, or with a sector of garbage.

Invariants:
- A later change of a name never survives an earlier one of the same name; all other choices are free.
- The same seed gives the same states; a state's ``label`` and ``point`` are enough to make it again.
- States share what they do not change, so that one costs microseconds, and no choice is given twice.
- Different choices may leave the same disk: what becomes of bytes without a name, nobody can see. ``Checked`` knows.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ckstore.hashing import digest_of
from support.simfs import FOLDER, Op, SimFS, Tree

SECTOR_NBYTES = 512

ByteOutcome = Literal["kept", "lost", "hole", "garbage", "torn", "sectors", "longer"]
"""What becomes of a file's unsynced bytes: ``"lost"`` leaves the last durable size and bytes, ``"hole"`` the new
size and zeros, ``"torn"`` the first sectors only, ``"sectors"`` any of them, ``"longer"`` all and zeros behind."""

OUTCOMES: tuple[ByteOutcome, ...] = ("kept", "lost", "hole", "garbage", "torn", "sectors", "longer")


@dataclass(frozen=True, slots=True)
class CrashState:
    """One state of the disk after a power cut.

    Args:
        point: How many steps of the record had been taken.
        label: What was chosen, for messages.
        marks: The marks of the test that stood in the record by then, such as acknowledged commits.
        disk: The disk as it is found; all of it is durable now.
    """

    point: int
    label: str
    marks: tuple[Hashable, ...]
    disk: SimFS


class CheckedStates:
    """The states that were checked: one that nobody can tell from an earlier one need not be checked again."""

    def __init__(self) -> None:
        self._levels: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Return how many states differ in anything that can be seen."""
        return len(self._levels)

    def is_new(self, state: CrashState, *, level: int = 0) -> bool:
        """Say whether a state has to be checked, and take note of it.

        Args:
            state: One that has just been made: nothing was written to its disk yet.
            level: How much is checked; a higher one includes all lower ones.
        """
        key = (_visible(state.disk.base), state.marks)
        if self._levels.get(key, -1) >= level:
            return False
        self._levels[key] = level
        return True


def _visible(tree: Tree) -> bytes:
    """Return a digest of every name, and of the bytes and the time that it leads to."""
    found = []
    for path, names in tree.folders.items():
        # An empty folder is a name in its parent; there are hundreds.
        if names:
            files = [(name, node) for name, node in names.items() if node != FOLDER]
            held = [(name, tree.times.get(node, 0), digest_of(tree.contents[node])) for name, node in files]
            found.append((path, sorted(names.keys()), sorted(held)))
    return digest_of(repr(sorted(found)).encode())


@dataclass(slots=True)
class _Choice:
    label: str
    kept: frozenset[int]
    outcomes: dict[int, ByteOutcome]
    default: ByteOutcome


def crash_states(
    disk: SimFS, *, seed: int, samples: int = 8, singles_max: int = 64, points: Collection[int] | None = None
) -> Iterator[CrashState]:
    """Yield the states that a cut after each step of the record can leave.

    Args:
        disk: The disk with its record; it is not changed.
        seed: Decides the samples, garbage and tears.
        samples: How many random choices to try at each point, beyond the corners.
        singles_max: How many names, and how many files, to choose one against all others, at most.
        points: Only cuts after this many steps; None: every one, before the first and after the last too.
    """
    platter = _Platter(disk.base)
    seen: set[Hashable] = set()
    for point in range(len(disk.log) + 1):
        if point:
            platter.apply(point - 1, disk.log[point - 1])
        if points is not None and point not in points:
            continue
        rng = random.Random(f"{seed}:{point}")
        for choice in _choices(platter, rng, samples, singles_max):
            kept = platter.closed(choice.kept)
            outcomes = {node: choice.outcomes.get(node, choice.default) for node in platter.dirty}
            key = platter.key(kept, outcomes, choice.label)
            if key not in seen:
                seen.add(key)
                yield CrashState(point, choice.label, tuple(platter.marks), platter.mount(kept, outcomes, rng))


def _choices(platter: _Platter, rng: random.Random, samples: int, singles_max: int) -> Iterator[_Choice]:
    names, dirty = frozenset(platter.pending), sorted(platter.dirty)
    nothing: frozenset[int] = frozenset()
    for outcome in OUTCOMES:
        yield _Choice(f"all names, bytes {outcome}", names, {}, outcome)
        yield _Choice(f"no new name, bytes {outcome}", nothing, {}, outcome)
    folders = {op.folder for op in platter.pending.values()}
    for folder in sorted(folders):
        inside = frozenset(index for index, op in platter.pending.items() if op.folder == folder)
        yield _Choice(f"names of {folder!r} lost", names - inside, {}, "kept")
        yield _Choice(f"only names of {folder!r}", inside, {}, "kept")
        yield _Choice(f"only names of {folder!r}, bytes lost", inside, {}, "lost")
    for index in rng.sample(sorted(names), min(singles_max, len(names))):
        yield _Choice(f"name {platter.pending[index].path!r} lost", names - {index}, {}, "kept")
        yield _Choice(f"only name {platter.pending[index].path!r}", frozenset({index}), {}, "kept")
    for node in rng.sample(dirty, min(singles_max, len(dirty))):
        for outcome in OUTCOMES[1:]:
            yield _Choice(f"file {node} {outcome}", names, {node: outcome}, "kept")
            yield _Choice(f"only file {node} not lost but {outcome}", names, {node: outcome}, "lost")
    if not names and not dirty:
        return
    for number in range(samples):
        share = rng.random()
        some = frozenset(index for index in sorted(names) if rng.random() < share)
        yield _Choice(f"sample {number}", some, {node: rng.choice(OUTCOMES) for node in dirty}, "kept")


@dataclass(slots=True)
class _File:
    """A file with bytes that no sync has covered."""

    steps: list[Op] = field(default_factory=list)


class _Platter:
    """What is durable at one point of the record, and what is not yet."""

    def __init__(self, base: Tree) -> None:
        self.folders = dict(base.folders)
        self.contents = dict(base.contents)
        self.times = base.times
        self.pending: dict[int, Op] = {}
        self.forgotten: set[int] = set()
        self.dirty: dict[int, _File] = {}
        self.marks: list[Hashable] = []
        self.version = 0

    def apply(self, index: int, op: Op) -> None:
        """Take one step of the record."""
        if op.kind == "entry":
            self.pending[index] = op
            if op.node is not None and op.node != FOLDER:
                self.contents.setdefault(op.node, b"")
        elif op.kind in ("write", "cut"):
            assert op.node is not None
            self.dirty.setdefault(op.node, _File()).steps.append(op)
        elif op.kind == "sync data":
            self._sync_data(op)
        elif op.kind == "lose data":
            assert op.node is not None
            self.dirty.pop(op.node, None)
        elif op.kind == "sync folder":
            synced = {i for i, entry in self.pending.items() if entry.folder == op.folder} - self.forgotten
            self._harden(synced)
        elif op.kind == "lose folder":
            self.forgotten |= {i for i, entry in self.pending.items() if entry.folder == op.folder}
        else:
            self.marks.append(op.mark)

    def closed(self, chosen: frozenset[int]) -> frozenset[int]:
        """Return the entries of ``chosen`` that can survive without those outside it."""
        kept = set(chosen)
        while True:
            blocked: set[tuple[str, str]] = set()
            before = len(kept)
            for index, op in self.pending.items():
                # What was needed and is no longer pending is durable already; what is not there yet is missing.
                needs_met = all(need in kept for need in op.needs if need in self.pending or need > index)
                if index not in kept or not needs_met or (op.folder, op.name) in blocked:
                    kept.discard(index)
                    blocked.add((op.folder, op.name))
            if len(kept) == before:
                return frozenset(kept)

    def key(self, kept: frozenset[int], outcomes: dict[int, ByteOutcome], label: str) -> Hashable:
        """Return what makes a state differ from every other one."""
        chance = label if any(outcome in ("garbage", "torn", "sectors") for outcome in outcomes.values()) else ""
        sizes = tuple((n, f, 0 if f == "lost" else len(self.dirty[n].steps)) for n, f in sorted(outcomes.items()))
        return (self.version, len(self.marks), kept, sizes, chance)

    def mount(self, kept: frozenset[int], outcomes: dict[int, ByteOutcome], rng: random.Random) -> SimFS:
        """Return a disk with what is durable, these names, and these bytes."""
        folders = dict(self.folders)
        own: set[str] = set()
        for index, op in self.pending.items():
            if index in kept:
                _put(folders, own, op)
        contents = dict(self.contents)
        for node, outcome in outcomes.items():
            contents[node] = _survivor(contents[node], self.dirty[node].steps, outcome, rng)
        # Only a folder whose own name may be lost can be out of reach.
        if any(op.node == FOLDER or op.call == "remove_folder" for op in self.pending.values()):
            folders = _reachable(folders)
        return SimFS(Tree(folders, contents, self.times))

    def _sync_data(self, op: Op) -> None:
        assert op.node is not None
        file = self.dirty.pop(op.node, None)
        if file is not None:
            self.contents[op.node] = _applied(self.contents[op.node], file.steps)
            self.version += 1

    def _harden(self, indexes: set[int]) -> None:
        # A name needs what came before it under the same name, and what a rename has tied it to.
        grown = set(indexes)
        while True:
            more = {need for index in grown for need in self.pending[index].needs if need in self.pending}
            names = {(self.pending[index].folder, self.pending[index].name): index for index in sorted(grown | more)}
            for index, op in self.pending.items():
                if index <= names.get((op.folder, op.name), -1):
                    more.add(index)
            if more <= grown:
                break
            grown |= more
        own: set[str] = set()
        for index in sorted(grown):
            _put(self.folders, own, self.pending.pop(index))
        self.version += bool(grown)


def _put(folders: dict[str, dict[str, int]], own: set[str], op: Op) -> None:
    if op.folder not in own:
        folders[op.folder] = dict(folders.get(op.folder, ()))
        own.add(op.folder)
    if op.node is None:
        folders[op.folder].pop(op.name, None)
    else:
        folders[op.folder][op.name] = op.node
        if op.node == FOLDER:
            folders.setdefault(op.path, {})


def _reachable(folders: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    waiting = [""]
    while waiting:
        path = waiting.pop()
        names = found[path] = folders.get(path, {})
        waiting += [f"{path}/{name}" if path else name for name, node in names.items() if node == FOLDER]
    return found


def _applied(durable: bytes, steps: list[Op]) -> bytes:
    if not durable and len(steps) == 1 and steps[0].kind == "write" and not steps[0].offset:
        return steps[0].content
    content = bytearray(durable)
    for op in steps:
        if op.kind == "cut":
            content[op.offset :] = bytes(max(0, op.offset - len(content)))
        else:
            content.extend(bytes(max(0, op.offset - len(content))))
            content[op.offset : op.offset + len(op.content)] = op.content
    return bytes(content)


def _survivor(durable: bytes, steps: list[Op], outcome: ByteOutcome, rng: random.Random) -> bytes:
    if outcome == "lost":
        return durable
    after = _applied(durable, steps)
    if outcome == "kept":
        return after
    if outcome == "longer":
        return after + bytes(4096)
    before = durable[: len(after)] + bytes(max(0, len(after) - len(durable)))
    if outcome == "hole" or not after:
        return before
    count = -(-len(after) // SECTOR_NBYTES)
    cut = rng.randrange(count) * SECTOR_NBYTES
    if outcome == "torn":
        # Bytes that were durable stay, even where the file ends early.
        rest = before[cut:] if rng.random() < 0.5 else before[cut : len(durable)]
        return after[:cut] + rest
    if outcome == "garbage":
        touched = after[cut : cut + SECTOR_NBYTES]
        garbage = rng.randbytes(len(touched)) if before[cut : cut + SECTOR_NBYTES] != touched else touched
        return after[:cut] + garbage + after[cut + len(touched) :]
    end = rng.randrange(cut, len(after)) // SECTOR_NBYTES * SECTOR_NBYTES + SECTOR_NBYTES
    if rng.random() < 0.5:
        return after[:cut] + before[cut:end] + after[end:]
    return before[:cut] + after[cut:end] + before[end:]
