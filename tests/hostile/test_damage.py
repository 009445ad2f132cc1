"""Every byte of a small store flipped, every truncation, swaps, zeroed and stale blocks.

After each mutation a restore raises CkstoreError or returns the right bytes, never others; and
``verify(level="decode")`` reports it, unless it lies in what is documented as disposable: leases, tmp, trash,
packs that no manifest names. Stores are copied in memory, so that a mutation costs milliseconds.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest

import ckstore
from ckstore.errors import CkstoreError, CorruptError
from ckstore.format import layout
from ckstore.io.memory import MemoryBackend, _File
from ckstore.testing.model import difference

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
    yield contents_of(backend, nbytes_max=64 << 10), set(backend._folders), STATES
    logging.getLogger("ckstore").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def small():
    """The same for one run with one pack, two checkpoints of it, a tag and a drop: every byte of it is tried."""
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
    yield contents_of(backend, nbytes_max=24 << 10), set(backend._folders), states
    logging.getLogger("ckstore").setLevel(logging.NOTSET)


def contents_of(backend, *, nbytes_max):
    files = {name: bytes(file.content) for name, file in backend._files.items()}
    assert sum(map(len, files.values())) <= nbytes_max
    return files


def copy_of(whole, changes=None):
    """Make a backend with these files, some changed; None removes one."""
    files, folders, _ = whole
    backend = MemoryBackend()
    backend._folders = set(folders)
    contents = {**files, **(changes or {})}
    backend._files = {name: _File(content, 1) for name, content in contents.items() if content is not None}
    return backend


def is_disposable(name):
    return name.startswith(("leases/", "tmp/", "trash/"))


def is_blank_alone(content, changed):
    """Say whether only white space behind a JSON record differs, which docs/FORMAT.md calls not covered."""
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
    if not all(is_disposable(name) or is_blank_alone(whole[0][name], content) for name, content in changes.items()):
        assert reported, f"{label}: verify did not report it"


def names(whole, kind):
    return sorted(name for name in whole[0] if name.startswith(kind))


def test_untouched_copy_is_right_and_clean(whole):
    assert check(whole, {}, "untouched") is False


def flipped(content, offset, mask=0x10):
    changed = bytearray(content)
    changed[offset] ^= mask
    return bytes(changed)


def strided(count, stride, seed):
    return range(seed % stride, count, stride)


class Probe:
    """One open store whose bytes are changed in place, for the mutations that there are many of."""

    def __init__(self, whole):
        self.backend = copy_of(whole)
        # A look into a folder of this backend goes through all names: of 256 folders nearly all are empty.
        self.backend._folders -= {f"packs/{number:02x}" for number in range(256)}
        self.stores = {run: ckstore.open(self.backend, run=run, policy=POLICY) for run in ("main", "other")}
        self.users = {}
        for store in self.stores.values():
            for name in store._parts.manifests.listing().names:
                user = (store, f"seq:{name.seq}", whole[2][name.step])
                self.users.setdefault(name.path, []).append(user)
                for pack in store._parts.manifests.load(name).packs:
                    self.users.setdefault(layout.pack_name(pack.pack_id), []).append(user)

    def flip(self, name, offset, mask):
        """Flip bits of one byte; verify must report it for the checkpoint whose commit wrote the file."""
        content = self.backend._files[name].content
        content[offset] ^= mask
        self._check_user_of(name, f"byte {offset}")
        content[offset] ^= mask

    def truncate_step_by_step(self, name):
        """Take one byte after the other from the end of a file until it is empty, as ``flip`` does."""
        content = self.backend._files[name].content
        whole = bytes(content)
        while content:
            del content[-1]
            self._check_user_of(name, f"cut to {len(content)}")
        content[:] = whole

    def _check_user_of(self, name, label):
        store, reference, state = self.users[name][0]
        outcome(lambda: store.restore(reference), [state])
        assert not store.verify("decode", ref=reference).is_clean, f"{name} {label}: verify did not report it"


@pytest.fixture
def probe(whole, nothing_aside):
    return Probe(whole)


@pytest.mark.parametrize("kind", ["store.json", "tags/", "claims/", "leases/"])
def test_flipped_byte_of_a_small_file_is_found(whole, kind):
    for name in names(whole, kind):
        content = whole[0][name]
        for offset in range(0, len(content), 2):
            check_reported(whole, {name: flipped(content, offset)}, f"{name} byte {offset}")


def test_flipped_byte_of_a_pack_or_manifest_is_found(whole, probe):
    for number, name in enumerate((*names(whole, "packs/"), *names(whole, "manifests/"))):
        content = whole[0][name]
        # Zeros are padding for the most part, and of one kind.
        of_interest = [offset for offset, byte in enumerate(content) if byte][number % 7 :: 7]
        for offset in (*of_interest, *strided(len(content), 101, number)):
            probe.flip(name, offset, 0x10)


def test_flip_that_a_named_checkpoint_does_not_need_leaves_it_right(whole):
    name = names(whole, "packs/")[0]
    content = whole[0][name]
    for offset in strided(len(content), 151, 1):
        check_reported(whole, {name: flipped(content, offset)}, f"{name} byte {offset}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
def test_every_flipped_byte_of_packs_and_manifests_is_found(small, nothing_aside, tell, kind):
    probe, count = Probe(small), 0
    for name in names(small, kind):
        for offset in range(len(small[0][name])):
            probe.flip(name, offset, (0x01, 0x80, 0x10, 0xFF)[(offset // 4) % 4])
            count += 1
    tell(f"damage: {count} bytes of {kind} flipped, one at a time")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_aside")
def test_every_flipped_byte_of_every_other_file_is_found(small):
    for name, content in small[0].items():
        if not name.startswith(("packs/", "manifests/")):
            for offset in range(len(content)):
                check_reported(small, {name: flipped(content, offset, 0x01)}, f"{name} byte {offset}")


def test_truncation_of_a_small_file_is_found(whole):
    for number, (name, content) in enumerate(whole[0].items()):
        if not name.startswith(("packs/", "trash/")):
            for nbytes in strided(len(content), 11, number):
                check_reported(whole, {name: content[:nbytes]}, f"{name} cut to {nbytes}")


def test_every_truncation_of_a_pack_by_512_bytes_is_found(whole):
    for name in names(whole, "packs/"):
        content = whole[0][name]
        for nbytes in range(0, len(content), 512):
            check_reported(whole, {name: content[:nbytes]}, f"{name} cut to {nbytes}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packs/", "manifests/"])
def test_every_truncation_of_packs_and_manifests_is_found(small, nothing_aside, tell, kind):
    probe = Probe(small)
    for name in names(small, kind):
        probe.truncate_step_by_step(name)
    tell(f"damage: {kind} cut to each of {sum(len(small[0][name]) for name in names(small, kind))} sizes")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_aside")
def test_every_truncation_of_every_other_file_is_found(small):
    for name, content in small[0].items():
        if not name.startswith(("packs/", "manifests/")):
            for nbytes in range(len(content)):
                check_reported(small, {name: content[:nbytes]}, f"{name} cut to {nbytes}")


def test_trailing_bytes_are_found(whole):
    for name, content in whole[0].items():
        if content:
            for tail in (b"\0", b"x" * 100, bytes(4096)):
                check_reported(whole, {name: content + tail}, f"{name} with {len(tail)} bytes behind it")


def test_zeroed_blocks_of_packs_and_manifests_are_found(whole):
    for name in (*names(whole, "packs/"), *names(whole, "manifests/")):
        content = whole[0][name]
        for begin in range(0, len(content), 512):
            changed = content[:begin] + bytes(len(content[begin : begin + 512])) + content[begin + 512 :]
            if changed != content:
                check_reported(whole, {name: changed}, f"{name} zeroed at {begin}")


def test_stale_blocks_are_found(whole):
    # What a lost write leaves behind: the block another pack of ours held in that place before.
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
                check_reported(whole, changes, f"{one} and {other} swapped")


def test_manifest_under_every_other_name_is_found(whole):
    found = names(whole, "manifests/")
    for one in found:
        for other in found:
            if one != other:
                check_reported(whole, {one: whole[0][other]}, f"{other} lies at {one}")


def test_missing_file_is_found(whole):
    for name in whole[0]:
        if name.startswith(("packs/", "claims/main/0000000")) and not name.endswith(".dropped"):
            if name == "claims/main/00000000":
                continue  # Its seq was dropped: nobody misses the claim but who would claim it again.
            check_reported(whole, {name: None}, f"{name} is missing")


def test_missing_manifest_never_makes_a_restore_wrong(whole):
    # Verify cannot tell it from a commit that was interrupted: the claim alone says nothing.
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
    # Chunks of a pack that cannot be read may be reused only if the manifest that names them is whole.
    for name in (*names(whole, "manifests/main/"), *names(whole, "tags/"), *names(whole, "leases/")):
        content = whole[0][name]
        for offset in strided(len(content), 41, 1):
            backend = copy_of(whole, {name: flipped(content, offset)})
            with ckstore.open(backend, create=False, policy=POLICY) as store:
                store.commit(STATES[1], 50)
                assert difference(store.restore(50), STATES[1]) is None


def test_wrong_store_file_never_opens_another_store_s_packs(whole):
    other = MemoryBackend()
    ckstore.open(other).close()
    backend = copy_of(whole, {"store.json": bytes(other._files["store.json"].content)})
    with ckstore.open(backend, create=False, policy=POLICY) as store:
        for step in STEPS:
            with pytest.raises(CorruptError):
                store.restore(step)
        assert not store.verify("quick").is_clean
