"""Protects automatic demotion after commits, in a separate process: by stored rules, with reported failures."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

import numpy as np

import ckstore
from ckstore._testing import repository_of, saver_of
from ckstore.config import DemotePolicy, Policy
from ckstore.ops.scheduled import AutomaticDemotion
from ckstore.store.store_config import change_config
from support.demotion_histories import SECONDS_MAX, check_exact_or_near, fidelities, states, wait_until

ALL = DemotePolicy(keep_newest=1, keep_every=0)


def test_store_with_rules_demotes_while_saver_runs(tmp_path):
    held = states(9)
    rules = {"keep_newest": 2, "keep_every": 3}
    with ckstore.open(tmp_path / "store", demotion=rules, demote_every=4) as store:
        for step, state in enumerate(held[:8]):
            store.commit_async(state, step).result()
            if step == 6:
                # A demotion that is still running after the eighth commit would leave its work to a later commit.
                wait_until(lambda: store.info(1).fidelity == "near" and not running_demotions())
        store.wait()
        assert saver_of(store) is not None
        wait_until(lambda: store.info(5).fidelity == "near")
        store.commit(held[8], 8)
        assert fidelities(store) == ["exact", "exact", "exact", "near", "near", "exact", "near", "near", "exact"]
        check_exact_or_near(store, held, newest=8)


def running_demotions():
    """Return the demotion processes of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            is_ours = int(parent) == os.getpid() and state not in "ZX"
            if is_ours and b"ops.scheduled import demote_on_request" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def demoted(store, wanted):
    """Start a demotion as after a commit, and wait for its end; return it."""
    automatic = AutomaticDemotion(repository_of(store), wanted, Policy())
    automatic.after_commit(store.log()[0].seq)
    assert automatic.child_pid is not None
    automatic.wait(SECONDS_MAX)
    automatic.close()
    return automatic


def test_demotion_process_finds_stored_rules(disk_store):
    for step, state in enumerate(states(3)):
        disk_store.commit(state, step)
    disk_store.set_demotion({"keep_newest": 1, "keep_every": 0, "fidelity": "near"})
    demoted(disk_store, "stored")
    assert fidelities(disk_store) == ["exact", "near", "near"]


def test_result_of_demotion_process_is_remembered(disk_store):
    for step in range(3):
        disk_store.commit({"counts": np.arange(9000) + step}, step)
    automatic = demoted(disk_store, ALL)
    _, _, asked = automatic.command("the next one")
    assert json.loads(asked)["tried"] == [0, 1]


def test_failed_demotion_is_only_logged(disk_store, caplog):
    for step, state in enumerate(states(3)):
        disk_store.commit(state, step)
    rules = {"demotion": {"keep_newst": 1}}
    change_config(repository_of(disk_store).backend, lambda record: type(record)(policy=rules))
    with caplog.at_level(logging.WARNING, logger="ckstore"):
        demoted(disk_store, "stored")
    assert "the demotion after a commit failed with exit code 2" in caplog.text
    assert "keep_newest" in caplog.text
