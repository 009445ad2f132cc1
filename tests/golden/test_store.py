"""Protects users who upgrade: stores of every released format version can be read."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.format.header import decode_preamble
from ckstore.format.records import FORMAT_VERSION
from ckstore.quant.error_stats import distance_of
from support.states import difference

GOLDEN = Path(__file__).parent
STORES = sorted(GOLDEN.glob("v*/store.tar"))


def _maker() -> object:
    spec = importlib.util.spec_from_file_location("make_golden_store", GOLDEN / "make_golden_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=STORES, ids=lambda path: path.parent.name)
def golden(request, tmp_path):
    with tarfile.open(request.param) as tar:
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "store").chmod(0o700)
    return tmp_path / "store"


def test_current_format_has_a_golden_store():
    assert GOLDEN / f"v{FORMAT_VERSION}" / "store.tar" in STORES


def test_golden_checkpoints_restore_bit_for_bit(golden):
    golden_state = _maker().golden_state
    with ckstore.open(golden, create=False) as store:
        assert [(info.seq, info.step) for info in store.log()] == [(4, 1), (2, 2), (1, 1), (0, 0)]
        for info in store.log():
            assert difference(store.restore(f"seq:{info.seq}"), golden_state(info.step)) is None
        assert store.tags() == {"kept": 1}
        assert store.info("best:loss").step == 2
    with ckstore.open(golden, run="other", create=False) as store:
        assert difference(store.restore(), golden_state(0)) is None


def test_golden_deltas_and_roundings_restore_exactly(golden):
    with ckstore.open(golden, run="moving", create=False) as store:
        if "moving" not in store.runs():
            assert repository_of(store).record.format_version == 1, "later versions have bases"
            return
        for step in range(3):
            assert difference(store.restore(step), _maker().moving_state(step)) is None
        assert (
            repository_of(store).manifests.load(repository_of(store).manifests.listing().names[-1]).header.depth_max
            >= 2
        )


def test_golden_residuals_restore_with_recorded_error(golden):
    with ckstore.open(golden, run="lossy", create=False) as store:
        if "lossy" not in store.runs():
            assert repository_of(store).record.format_version < 3, "later versions can lose something"
            return
        methods = set()
        for step in store.steps():
            found, committed = store.restore(step), _maker().lossy_state(step)
            flat, losses = dict(_arrays(found)), store.contents(step).losses
            for path, array in _arrays(committed):
                lost = next((loss for loss in losses if loss.path == path), None)
                made = distance_of(array, flat[path])
                assert made.max_abs == pytest.approx(0.0 if lost is None else lost.max_abs, rel=1e-5)
            methods.update(loss.method for loss in losses)
        codebooks = {"codebook"} if repository_of(store).record.format_version == 3 else set()
        assert methods >= {"grid", "log", "ternary", "rank1", "dropped", "rounded"} | codebooks


def _arrays(state, path=""):
    if isinstance(state, dict):
        for key, part in state.items():
            yield from _arrays(part, f"{path}.{key}" if path else str(key))
    elif isinstance(state, np.ndarray):
        yield path, state


def test_golden_store_verifies_clean(golden):
    with ckstore.open(golden, create=False) as store:
        report = store.verify("decode")
        assert report.damage == []
        counts = {1: 5, 2: 5 + 3, 3: 5 + 3 + 6, 4: 5 + 3 + 5}
        assert report.checkpoint_count == counts[repository_of(store).record.format_version]


def test_golden_store_accepts_commits(golden):
    with ckstore.open(golden) as store:
        receipt = store.commit(_maker().golden_state(0), 9)
        assert receipt.seq == 5
        assert receipt.bytes_written == 0, "chunks of the golden store were not recognised"


def versions_of(store):
    """Return the format versions of all manifests in a folder."""
    return {decode_preamble(path.read_bytes()).version for path in store.glob("manifests/*/*.ckm")}


def test_stores_with_old_and_new_manifests_work(golden, tmp_path):
    old = versions_of(golden)
    with ckstore.open(golden) as store:
        restored = {info.seq: store.restore(f"seq:{info.seq}") for info in store.log()}
        restored[store.commit(_maker().golden_state(0), 9).seq] = _maker().golden_state(0)
        store.delete("seq:2")
        restored[store.undelete("seq:2").seq] = restored.pop(2)
        assert versions_of(golden) == old | {FORMAT_VERSION}
        assert store.push(str(tmp_path / "cold"), tier="cold").packs_copied
        for work in (lambda: None, lambda: store.gc(now=True), store.pull, lambda: store.gc(now=True)):
            work()
            assert store.verify("decode").damage == []
            assert {info.seq for info in store.log()} == set(restored)
            for seq, state in restored.items():
                assert difference(store.restore(f"seq:{seq}"), state) is None
    # The collections have moved its chunks.
    with ckstore.open(golden, run="other", create=False) as store:
        assert difference(store.restore(), _maker().golden_state(0)) is None
    assert ckstore.repair_store(golden).is_clean
