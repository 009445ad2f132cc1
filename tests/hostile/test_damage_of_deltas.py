"""Protects readers from flipped bytes, truncations and misplaced blocks in a store of deltas and their bases.

After each mutation a restore raises CkstoreError or returns the right bytes, whatever base a delta is applied to.
``verify(level="decode")`` reports the mutation.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import Limits
from ckstore.errors import CkstoreError
from ckstore.format.paths import pack_name
from ckstore.io.memory import MemoryBackend
from ckstore.store.store_config import create_store
from support import memory_files
from support.chains import ChainWriter
from support.model import difference

pytestmark = pytest.mark.usefixtures("quiet_log")

POLICY = ckstore.Policy(threads=1)
STEPS = range(4)


def state_at(step):
    source = np.random.default_rng(7)
    w = source.standard_normal(1100).astype(np.float32)
    for _ in range(step):
        w = w + source.standard_normal(1100).astype(np.float32) * np.float32(1e-4)
    counts = np.arange(530, dtype=np.int64) + step
    return {"w": w, "half": w.astype(np.float16), "counts": counts, "b": [w[:9].copy(), w[9:30].copy()], "n": step}


@pytest.fixture(scope="module")
def whole():
    """A backend with a chain of checkpoints, and which packs each of them needs."""
    backend = MemoryBackend()
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=4096))
    packs = {}
    with ckstore.open(backend, policy=POLICY) as store:
        writer = ChainWriter(store)
        for step in STEPS:
            manifest = writer.commit(state_at(step), step, base=None if step == 0 else -1)
            packs[step] = [pack_name(pack.pack_id) for pack in manifest.packs]
        assert manifest.header.depth_max == 4, "three residuals, and what is rounded from the last one"
    # This backend lists a folder by visiting all names, and nearly all of the 256 folders are empty.
    memory_files.remove_empty_folders(backend)
    return backend, packs


def check(whole, changes, label):
    """Restore everything from a changed copy: right or an error; verify reports damage."""
    original, packs = whole
    backend = memory_files.copy_of(original, changes)
    with ckstore.open(backend, create=False, policy=POLICY) as store:
        outcomes = {}
        for step in STEPS:
            for only in (None, "half", "b.*"):
                try:
                    found = store.restore(step, only=only)
                except CkstoreError:
                    outcomes[step, only] = "raised"
                    continue
                expected = state_at(step) if only is None else {only[0] if only == "b.*" else only: None}
                if only is not None:
                    name = next(iter(expected))
                    expected = {name: state_at(step)[name]}
                assert difference(found, expected) is None, f"{label}: a wrong state came back"
                outcomes[step, only] = "right"
        assert not store.verify("decode").is_clean, f"{label}: verify saw nothing"
        for step in STEPS:
            touched = any(name in changes for name in packs[step])
            assert touched or {outcomes[step, only] for only in (None, "half", "b.*")} == {"right"}, label


def pack_names(whole):
    return memory_files.names_of(whole[0], "packs/")


@pytest.mark.deep
def test_flipped_byte_harms_only_dependent_checkpoints(whole, no_quarantine, sample):
    contents = memory_files.files_of(whole[0], "packs/")
    # A run selects the same offsets in all packs, because the order of packs changes: their names are random.
    offsets = sample.part(range(0, max(map(len, contents.values())), 37), parts=64)
    points = [(name, offset) for offset in offsets for name in contents if offset < len(contents[name])]
    for name, offset in points:
        changed = bytearray(contents[name])
        changed[offset] ^= 1 << offset % 8
        check(whole, {name: bytes(changed)}, f"{name} byte {offset}")
    assert len(points) > (1000 if sample.is_whole else 20)
    assert {name for name, _ in points} == set(contents)


def test_truncated_and_stale_packs_are_found(whole, no_quarantine):
    found, files = pack_names(whole), whole[0].files()
    for name, other in zip(found, found[1:] + found[:1], strict=True):
        content, stale = files[name], files[other]
        check(whole, {name: content[:4096]}, f"{name} cut")
        check(whole, {name: stale}, f"{other} lies at {name}")
        for begin in range(0, len(content), 1024):
            changed = content[:begin] + stale[begin : begin + 512] + content[begin + 512 :]
            if changed != content and len(changed) == len(content):
                check(whole, {name: changed}, f"{name} stale at {begin}")


def test_undamaged_store_is_clean(whole):
    with ckstore.open(whole[0], create=False, policy=POLICY) as store:
        assert store.verify("decode").is_clean
        for step in STEPS:
            assert difference(store.restore(step), state_at(step)) is None
