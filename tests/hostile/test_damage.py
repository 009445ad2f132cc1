"""Protects readers from damaged files: flipped bytes, truncations, swaps, zeroed and stale blocks.

After each mutation a restore raises CkstoreError or returns the right bytes. ``verify(level="decode")`` reports the
mutation, unless it is in something documented as disposable: leases, tmp, trash, reserve, the content of a drop mark,
and packs that no manifest names. A deep run flips every byte of a small store and truncates each of its files to every
length. Stores are copied in memory, so that a mutation takes milliseconds.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CkstoreError, CorruptError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from support import memory_files
from support.model import difference

pytestmark = pytest.mark.usefixtures("quiet_log")

POLICY = ckstore.Policy(threads=1)
STEPS = (1, 2)


def state_of(step):
    source = np.random.default_rng(7)
    return {
        "w": source.standard_normal(400).astype(np.float32),
        "changing": source.standard_normal(300 + step),
        "ints": np.arange(step, step + 90),
        "const": np.full(70, 3, np.uint8),
        "plain": [None, step, 1.5, "text", (b"bytes", 2**70)],
    }


STATES = {step: state_of(step) for step in STEPS}


@pytest.fixture(scope="module")
def whole():
    """Name to content of a store with two checkpoints, a tag, a drop and a second run; its folders; its states."""
    logging.getLogger("ckstore").setLevel(logging.CRITICAL)
    backend = MemoryBackend()
    with ckstore.open(backend, policy=POLICY) as store:
        store.commit({"gone": 1}, 9)
        store.delete(9)
        for step in STEPS:
            store.commit(STATES[step], step, metrics={"loss": 1 / step})
        store.tag(1, "good")
    with ckstore.open(backend, run="other", policy=POLICY) as store:
        store.commit(STATES[1], 1)
    yield contents_of(backend, nbytes_max=64 << 10), backend, STATES
    logging.getLogger("ckstore").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def small():
    """The same for a small store: one run, one pack, two checkpoints, a tag and a drop. Every byte of it is tested."""
    logging.getLogger("ckstore").setLevel(logging.CRITICAL)
    backend = MemoryBackend()
    arrays = {"w": np.random.default_rng(7).standard_normal(40).astype(np.float32), "ints": np.arange(60)}
    states = {step: {**arrays, "plain": [None, step, "text"]} for step in STEPS}
    with ckstore.open(backend, policy=POLICY) as store:
        store.commit({"gone": 1}, 9)
        store.delete(9)
        for step in STEPS:
            store.commit(states[step], step)
        store.tag(1, "good")
    yield contents_of(backend, nbytes_max=24 << 10), backend, states
    logging.getLogger("ckstore").setLevel(logging.NOTSET)


def contents_of(backend, *, nbytes_max):
    files = backend.files()
    assert sum(map(len, files.values())) <= nbytes_max
    return files


def copy_of(whole, changes=None):
    """Make a backend with these files, some changed; None removes one."""
    return memory_files.copy_of(whole[1], changes)


def is_disposable(name):
    return name.startswith(("leases/", "tmp/", "trash/", "reserve/"))


def is_mark_still(name, content):
    """Return whether this leaves a drop mark in place: its content has no meaning, as docs/FORMAT.md says."""
    return name.endswith(".dropped") and content is not None


def is_blank_alone(content, changed):
    """Return whether only white space after a JSON record differs, which docs/FORMAT.md calls not covered."""
    return changed is not None and content.startswith(b"{") and content.rstrip() == changed.rstrip()


def outcome(call, right):
    """Return "right" or "raised"; anything else is a failure."""
    try:
        found = call()
    except CkstoreError:
        return "raised"
    assert any(difference(found, state) is None for state in right), "a wrong state came back"
    return "right"


def check(whole, changes, label):
    """Restore everything from a changed copy, and verify it; return what was reported."""
    backend, states = copy_of(whole, changes), whole[2]
    try:
        store = ckstore.open(backend, create=False, policy=POLICY)
    except CkstoreError:
        assert set(changes) == {"store.json"}, label
        return True
    with store:
        newest = outcome(store.restore, list(states.values()))
        named = {step: outcome(lambda step=step: store.restore(step), [states[step]]) for step in STEPS}
        by_tag = outcome(lambda: store.restore("good"), [states[1]])
        report = store.verify("decode")
        if report.is_clean:
            assert {newest, by_tag, *named.values()} == {"right"}, f"{label}: verify saw nothing, a restore did"
            assert difference(store.restore(), states[2]) is None, f"{label}: an older one came back unreported"
        return not report.is_clean


def check_reported(whole, changes, label):
    reported = check(whole, changes, label)
    if not all(
        is_disposable(name) or is_mark_still(name, content) or is_blank_alone(whole[0][name], content)
        for name, content in changes.items()
    ):
        assert reported, f"{label}: verify did not report it"


def names(whole, kind):
    return sorted(name for name in whole[0] if name.startswith(kind))


def test_unchanged_copy_is_clean(whole):
    assert check(whole, {}, "untouched") is False


def flipped(content, offset, mask=0x10):
    changed = bytearray(content)
    changed[offset] ^= mask
    return bytes(changed)


def strided(count, stride, seed):
    return range(seed % stride, count, stride)


class Probe:
    """An open store whose bytes are changed in place, for tests with many mutations."""

    def __init__(self, whole):
        self.whole, self.backend = whole[0], copy_of(whole)
        # This backend lists a folder by visiting all names, and nearly all of the 256 folders are empty.
        memory_files.remove_empty_folders(self.backend)
        self.stores = {run: ckstore.open(self.backend, run=run, policy=POLICY) for run in ("main", "other")}
        self.users = {}
        for store in self.stores.values():
            manifests = repository_of(store).manifests
            for name in manifests.listing().names:
                user = (store, f"seq:{name.seq}", whole[2][name.step])
                self.users.setdefault(name.path, []).append(user)
                for pack in manifests.load(name).packs:
                    self.users.setdefault(paths.pack_name(pack.pack_id), []).append(user)

    def flip(self, name, offset, mask):
        """Flip bits of one byte; verify must report it for the checkpoint whose commit wrote the file."""
        self.backend.overwrite(name, flipped(self.whole[name], offset, mask))
        self._check_user_of(name, f"byte {offset}")
        self.backend.overwrite(name, self.whole[name])

    def truncate(self, name, nbytes):
        """Truncate a file to a length, and check as ``flip`` does."""
        self.backend.overwrite(name, self.whole[name][:nbytes])
        self._check_user_of(name, f"cut to {nbytes}")
        self.backend.overwrite(name, self.whole[name])

    def _check_user_of(self, name, label):
        store, reference, state = self.users[name][0]
        outcome(lambda: store.restore(reference), [state])
        assert not store.verify("decode", ref=reference).is_clean, f"{name} {label}: verify did not report it"


CODED = ("packs/", "manifests/")
"""Kinds of files that a probe changes in place: any damage affects a checkpoint that uses them."""


def is_coded(name):
    return name.startswith(CODED)


def is_not_coded(name):
    return not name.startswith(CODED)


@pytest.fixture
def probes(small, whole, no_quarantine):
    return {"small": Probe(small), "whole": Probe(whole)}


def points_of(small, whole, is_wanted, stride, *, part=lambda offsets: offsets):
    """Return (store, file, offset) for bytes of the small store, and for every ``stride``-th byte of the other one.

    ``part`` selects offsets, the same ones for all files, because the order of files differs in each run: names of
    packs are random.
    """
    found = []
    for which, store, step in (("small", small, 1), ("whole", whole, stride)):
        contents = {name: content for name, content in store[0].items() if is_wanted(name)}
        for offset in part(range(0, max(map(len, contents.values())), step)):
            found += [(which, name, offset) for name, content in contents.items() if offset < len(content)]
    return found


def mask_at(offset):
    return (0x01, 0x80, 0x10, 0xFF)[(offset // 4) % 4]


@pytest.mark.deep
def test_verify_reports_flipped_pack_or_manifest_byte(small, whole, probes, sample, note):
    all_points = points_of(small, whole, is_coded, 7)
    points = points_of(small, whole, is_coded, 7, part=partial(sample.part, parts=64))
    for which, name, offset in points:
        probes[which].flip(name, offset, mask_at(offset))
    assert len(points) >= (18_768 if sample.is_whole else 18_768 // 64)
    note(f"damage: {len(points)} of {len(all_points)} bytes of packs and manifests flipped, one at a time")


@pytest.mark.deep
def test_verify_reports_truncated_pack_or_manifest(small, whole, probes, sample, note):
    all_points = points_of(small, whole, is_coded, 64)
    points = points_of(small, whole, is_coded, 64, part=partial(sample.part, parts=64))
    for which, name, nbytes in points:
        probes[which].truncate(name, nbytes)
    assert len(points) >= (18_768 if sample.is_whole else 18_768 // 64)
    note(f"damage: packs and manifests cut to {len(points)} of {len(all_points)} sizes")


@pytest.mark.deep
@pytest.mark.usefixtures("no_quarantine")
def test_verify_reports_flipped_byte_of_other_file(small, whole, sample):
    stores = {"small": small, "whole": whole}
    points = points_of(small, whole, is_not_coded, 2, part=partial(sample.part, parts=20))
    for which, name, offset in points:
        content = stores[which][0][name]
        check_reported(stores[which], {name: flipped(content, offset, mask_at(offset))}, f"{name} byte {offset}")
    assert {name.split("/")[0] for _, name, _ in points} >= {"store.json", "tags", "trash"}


@pytest.mark.deep
@pytest.mark.usefixtures("no_quarantine")
def test_verify_reports_truncated_other_file(small, whole, sample):
    stores = {"small": small, "whole": whole}
    points = points_of(small, whole, is_not_coded, 11, part=partial(sample.part, parts=20))
    for which, name, nbytes in points:
        check_reported(stores[which], {name: stores[which][0][name][:nbytes]}, f"{name} cut to {nbytes}")
    assert {name.split("/")[0] for _, name, _ in points} >= {"store.json", "tags", "trash"}


def test_unneeded_flip_leaves_checkpoint_right(whole):
    name = names(whole, "packs/")[0]
    content = whole[0][name]
    for offset in strided(len(content), 151, 1):
        check_reported(whole, {name: flipped(content, offset)}, f"{name} byte {offset}")


def test_trailing_bytes_are_found(whole):
    for name, content in whole[0].items():
        if content:
            for tail in (b"\0", b"x" * 100, bytes(4096)):
                check_reported(whole, {name: content + tail}, f"{name} with {len(tail)} bytes behind it")


def test_zeroed_blocks_are_found(whole):
    for name in (*names(whole, "packs/"), *names(whole, "manifests/")):
        content = whole[0][name]
        for begin in range(0, len(content), 512):
            changed = content[:begin] + bytes(len(content[begin : begin + 512])) + content[begin + 512 :]
            if changed != content:
                check_reported(whole, {name: changed}, f"{name} zeroed at {begin}")


def test_stale_blocks_are_found(whole):
    # The result of a lost write: the block that another pack had at this place before.
    packs = names(whole, "packs/")
    for name, other in zip(packs, packs[1:] + packs[:1], strict=True):
        content, stale = whole[0][name], whole[0][other]
        for begin in range(0, min(len(content), len(stale)), 512):
            changed = content[:begin] + stale[begin : begin + 512] + content[begin + 512 :]
            if changed != content and len(changed) == len(content):
                check_reported(whole, {name: changed}, f"{name} stale at {begin}")


def test_misplaced_blocks_within_a_pack_are_found(whole):
    for name in names(whole, "packs/"):
        content = whole[0][name]
        for begin in range(0, len(content) - 1024, 512):
            changed = content[:begin] + content[begin + 512 : begin + 1024] + content[begin + 512 :]
            if changed != content:
                check_reported(whole, {name: changed}, f"{name} block {begin} is its neighbour")


@pytest.mark.parametrize("kind", ["packs/", "manifests/main/", "tags/", "claims/main/"])
def test_swapped_files_are_found(whole, kind):
    found = names(whole, kind)
    for one in found:
        for other in found:
            if one < other and whole[0][one] != whole[0][other]:
                changes = {one: whole[0][other], other: whole[0][one]}
                # A claim takes its seq and a drop mark drops it whatever they contain: both still exist.
                look = check if kind.startswith("claims/") else check_reported
                look(whole, changes, f"{one} and {other} swapped")


def test_manifest_under_every_other_name_is_found(whole):
    found = names(whole, "manifests/")
    for one in found:
        for other in found:
            if one != other:
                check_reported(whole, {one: whole[0][other]}, f"{other} lies at {one}")


def test_missing_file_is_found(whole):
    for name in whole[0]:
        # Making the mark ``published`` may fail, so its absence proves nothing. If a drop mark is missing, its manifest
        # is in the trash.
        if name.startswith(("packs/", "claims/main/0000000")) and not name.endswith((".dropped", ".published")):
            if name == "claims/main/00000000":
                continue  # Its seq was dropped, so the claim only prevents reuse.
            check_reported(whole, {name: None}, f"{name} is missing")


def test_missing_manifest_never_gives_wrong_restore(whole):
    # Verify cannot distinguish it from an interrupted commit: the claim alone proves nothing.
    for name in names(whole, "manifests/"):
        backend = copy_of(whole, {name: None})
        with ckstore.open(backend, create=False, policy=POLICY) as store:
            assert outcome(store.restore, list(STATES.values())) == "right"
            for step in STEPS:
                outcome(lambda step=step, store=store: store.restore(step), [STATES[step]])


def test_files_full_of_noise_are_found(whole):
    noise = np.random.default_rng(3)
    for name, content in whole[0].items():
        if content:
            for _ in range(3):
                check_reported(whole, {name: noise.bytes(len(content))}, f"{name} is noise")


def test_commit_after_damage_never_relies_on_it(whole):
    # Chunks of an unreadable pack may be reused only if the manifest that names them is intact.
    for name in (*names(whole, "manifests/main/"), *names(whole, "tags/"), *names(whole, "leases/")):
        content = whole[0][name]
        for offset in strided(len(content), 41, 1):
            backend = copy_of(whole, {name: flipped(content, offset)})
            with ckstore.open(backend, create=False, policy=POLICY) as store:
                store.commit(STATES[1], 50)
                assert difference(store.restore(50), STATES[1]) is None


def test_foreign_store_file_is_refused(whole):
    other = MemoryBackend()
    ckstore.open(other).close()
    backend = copy_of(whole, {"store.json": other.files()["store.json"]})
    with ckstore.open(backend, create=False, policy=POLICY) as store:
        for step in STEPS:
            with pytest.raises(CorruptError):
                store.restore(step)
        assert not store.verify("quick").is_clean
