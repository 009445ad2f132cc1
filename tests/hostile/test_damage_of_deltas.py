"""Protects readers from flipped bytes, truncations and misplaced blocks in a store of deltas and their bases.

After each mutation a restore raises CkstoreError or returns the right bytes, never others, whatever base a delta is
applied to; and ``verify(level="decode")`` reports it.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import Limits
from ckstore.errors import CkstoreError
from ckstore.format.layout import pack_name
from ckstore.io.memory import MemoryBackend, _File
from ckstore.store.parts import create_store
from ckstore.testing.chains import ChainWriter
from ckstore.testing.model import difference

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
    # A look into a folder of this backend goes through all names: of 256 folders nearly all are empty.
    backend._folders -= {f"packs/{number:02x}" for number in range(256)}
    return backend, packs


def check(whole, changes, label):
    """Restore everything from a changed copy: right or an error; verify tells."""
    original, packs = whole
    backend = MemoryBackend()
    backend._folders = set(original._folders)
    for name, file in original._files.items():
        backend._files[name] = _File(changes.get(name, bytes(file.content)), 1)
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
    return sorted(name for name in whole[0]._files if name.startswith("packs/"))


@pytest.mark.deep
def test_flipped_byte_of_a_pack_is_reported_and_harms_only_checkpoints_that_need_it(whole, nothing_aside, sample):
    contents = {name: bytes(whole[0]._files[name].content) for name in pack_names(whole)}
    points = [(name, offset) for name, content in contents.items() for offset in range(0, len(content), 37)]
    taken = sample.part(points, parts=40)
    for name, offset in taken:
        changed = bytearray(contents[name])
        changed[offset] ^= 1 << offset % 8
        check(whole, {name: bytes(changed)}, f"{name} byte {offset}")
    assert len(points) > 1000
    assert {name for name, _ in taken} == set(contents)


def test_truncated_and_stale_packs_are_found(whole, nothing_aside):
    found = pack_names(whole)
    for name, other in zip(found, found[1:] + found[:1], strict=True):
        content, stale = bytes(whole[0]._files[name].content), bytes(whole[0]._files[other].content)
        check(whole, {name: content[:4096]}, f"{name} cut")
        check(whole, {name: stale}, f"{other} lies at {name}")
        for begin in range(0, len(content), 1024):
            changed = content[:begin] + stale[begin : begin + 512] + content[begin + 512 :]
            if changed != content and len(changed) == len(content):
                check(whole, {name: changed}, f"{name} stale at {begin}")


def test_whole_store_is_right_and_clean(whole):
    with ckstore.open(whole[0], create=False, policy=POLICY) as store:
        assert store.verify("decode").is_clean
        for step in STEPS:
            assert difference(store.restore(step), state_at(step)) is None
