"""The process of a saver: light, never torch, and ended by SIGTERM alone, when nothing is left to do."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import NotFoundError
from ckstore.format import paths
from ckstore.processes import JOB_SIGNALS
from support.saver_harness import SECONDS_MAX, SOURCE, SaverHarness, links, noise, until

NICE = 7

# SIGTERM asks a saver to end: tests of its own are below.
NAMED = sorted(number for number in JOB_SIGNALS - {signal.SIGTERM} if isinstance(number, signal.Signals))


@pytest.fixture(scope="module")
def started():
    """A desk with a saver that gives way; the processor's seconds that its start took, and what it has open then."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="ckstore-process-", dir=memory if memory.is_dir() else None)
    ckstore.open(f"{folder}/store").close()
    desk = SaverHarness(f"{folder}/store", nice=NICE)
    try:
        assert desk.saver.wait_ready(SECONDS_MAX)
        fields = Path(f"/proc/{desk.saver.pid}/stat").read_text().rsplit(")", 1)[-1].split()
        yield desk, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), links(desk.saver.pid)
    finally:
        desk.close()
        shutil.rmtree(folder)


@pytest.fixture
def ready(started):
    """That desk."""
    return started[0]


def test_saver_starts_in_well_under_a_second(started):
    # Time on the processor, for others may keep it from us.
    assert started[1] < 0.9


def test_saver_imports_neither_torch_nor_what_the_trainer_has(ready):
    code = "import sys, ckstore.background.saver.server; print(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    ready.commit(noise(1), 1)
    # Not the bare word: the whole environment may lie in a folder of that name.
    maps = Path(f"/proc/{ready.saver.pid}/maps").read_text()
    assert not re.search(r"/site-packages/torch/|libtorch|libc10", maps)


def test_saver_says_on_its_command_line_what_it_is_and_not_where_it_saves(ready):
    command = Path(f"/proc/{ready.saver.pid}/cmdline").read_bytes()
    assert b"ckstore.background.saver" in command
    assert ready.address.encode() not in command


def test_saver_has_three_descriptors_of_its_trainer_and_gives_way(started):
    desk, _, held = started
    pid = desk.saver.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert sum("ckstore-arena" in link for link in held) == 1
    assert sum("eventfd" in link for link in held) == 1
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")


@pytest.mark.parametrize("number", NAMED, ids=lambda number: number.name)
def test_signal_to_all_processes_of_a_job_does_not_end_a_saver(ready, number):
    begun = ready.begin(noise(2), 2).stage(1)
    os.kill(ready.saver.pid, number)
    assert begun.stage().finish().wait().step == 2


def test_real_time_signals_do_not_end_a_saver(ready):
    for number in JOB_SIGNALS - set(NAMED) - {signal.SIGTERM}:
        os.kill(ready.saver.pid, number)
    assert ready.commit(noise(2), 2).step == 2


def test_signals_to_a_saver_that_is_starting_do_not_end_it(desk):
    for number in JOB_SIGNALS - {signal.SIGTERM}:
        os.kill(desk.saver.pid, number)
    assert desk.commit(noise(1), 1).step == 1


def test_log_records_of_the_saver_reach_the_trainer_s_log(ready, caplog):
    ready.commit(noise(3), 3)
    lease = Path(ready.address) / paths.lease_name("main")
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.write_bytes(b"torn")
        ready.begin(noise(4), 4).stage().finish()
        until(lambda: "is unreadable and will be replaced" in caplog.text, "the record")
    assert f"saver (pid {ready.saver.pid})" in caplog.text


def test_saver_of_a_store_that_is_not_there_reports_it_to_whoever_waits_or_commits(tmp_path):
    desk = SaverHarness(tmp_path / "none")
    try:
        with pytest.raises(NotFoundError, match="no store here"):
            desk.saver.wait_ready(SECONDS_MAX)
        with pytest.raises(NotFoundError):
            desk.commit(noise(1), 1)
    finally:
        desk.close()


def test_saver_that_gets_sigterm_finishes_what_has_begun_and_then_ends(desk, address):
    handed = desk.begin(noise(1), 1).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    os.kill(desk.saver.pid, signal.SIGTERM)
    assert not handed.ended.wait(0.2)
    handed.stage().finish()
    assert handed.wait().seq == 0
    until(lambda: not desk.saver.is_alive, "the end of the saver")
    assert not (Path(address) / paths.lease_name("main")).exists()
    desk.start()
    assert desk.commit(noise(2), 2).seq == 1


def test_saver_that_is_idle_ends_by_sigterm(desk, address):
    desk.commit(noise(1), 1)
    os.kill(desk.saver.pid, signal.SIGTERM)
    until(lambda: not desk.saver.is_alive, "the end of the saver")
    assert not (Path(address) / paths.lease_name("main")).exists()
