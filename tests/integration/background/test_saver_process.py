"""Protects the saver process: it starts fast, never imports torch, and on SIGTERM ends when its work is done."""

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

# SIGTERM asks a saver to end; it has separate tests below.
NAMED = sorted(number for number in JOB_SIGNALS - {signal.SIGTERM} if isinstance(number, signal.Signals))


@pytest.fixture(scope="module")
def started():
    """A harness with a low-priority saver; the processor time of its start, and its open descriptors."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="ckstore-process-", dir=memory if memory.is_dir() else None)
    ckstore.open(f"{folder}/store").close()
    harness = SaverHarness(f"{folder}/store", nice=NICE)
    try:
        assert harness.saver.wait_ready(SECONDS_MAX)
        fields = Path(f"/proc/{harness.saver.pid}/stat").read_text().rsplit(")", 1)[-1].split()
        yield harness, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), links(harness.saver.pid)
    finally:
        harness.close()
        shutil.rmtree(folder)


@pytest.fixture
def ready(started):
    """That harness."""
    return started[0]


def test_saver_starts_in_less_than_a_second(started):
    # Processor time, because other programs may delay it.
    assert started[1] < 0.9


def test_saver_does_not_import_torch(ready):
    code = "import sys, ckstore.background.saver.server; print(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    ready.commit(noise(1), 1)
    # Not the bare word, because the environment may be in a folder of that name.
    maps = Path(f"/proc/{ready.saver.pid}/maps").read_text()
    assert not re.search(r"/site-packages/torch/|libtorch|libc10", maps)


def test_command_line_of_saver_hides_the_address(ready):
    command = Path(f"/proc/{ready.saver.pid}/cmdline").read_bytes()
    assert b"ckstore.background.saver" in command
    assert ready.address.encode() not in command


def test_saver_has_three_descriptors_and_low_priority(started):
    harness, _, held = started
    pid = harness.saver.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + NICE
    assert sum("ckstore-arena" in link for link in held) == 1
    assert sum("eventfd" in link for link in held) == 1
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")


@pytest.mark.parametrize("number", NAMED, ids=lambda number: number.name)
def test_job_signals_do_not_end_a_saver(ready, number):
    begun = ready.begin(noise(2), 2).stage(1)
    os.kill(ready.saver.pid, number)
    assert begun.stage().finish().wait().step == 2


def test_real_time_signals_do_not_end_a_saver(ready):
    for number in JOB_SIGNALS - set(NAMED) - {signal.SIGTERM}:
        os.kill(ready.saver.pid, number)
    assert ready.commit(noise(2), 2).step == 2


def test_signals_do_not_end_a_starting_saver(harness):
    for number in JOB_SIGNALS - {signal.SIGTERM}:
        os.kill(harness.saver.pid, number)
    assert harness.commit(noise(1), 1).step == 1


def test_log_records_of_saver_reach_the_trainer(ready, caplog):
    ready.commit(noise(3), 3)
    lease = Path(ready.address) / paths.lease_name("main")
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.write_bytes(b"torn")
        ready.begin(noise(4), 4).stage().finish()
        until(lambda: "is unreadable and will be replaced" in caplog.text, "the record")
    assert f"saver (pid {ready.saver.pid})" in caplog.text


def test_saver_of_missing_store_reports_error(tmp_path):
    harness = SaverHarness(tmp_path / "none")
    try:
        with pytest.raises(NotFoundError, match="no store here"):
            harness.saver.wait_ready(SECONDS_MAX)
        with pytest.raises(NotFoundError):
            harness.commit(noise(1), 1)
    finally:
        harness.close()


def test_sigterm_lets_saver_finish_begun_commits(harness, address):
    in_flight = harness.begin(noise(1), 1).stage(1)
    assert in_flight.began.wait(SECONDS_MAX)
    os.kill(harness.saver.pid, signal.SIGTERM)
    assert not in_flight.ended.wait(0.2)
    in_flight.stage().finish()
    assert in_flight.wait().seq == 0
    until(lambda: not harness.saver.is_alive, "the end of the saver")
    assert not (Path(address) / paths.lease_name("main")).exists()
    harness.start()
    assert harness.commit(noise(2), 2).seq == 1


def test_sigterm_ends_an_idle_saver(harness, address):
    harness.commit(noise(1), 1)
    os.kill(harness.saver.pid, signal.SIGTERM)
    until(lambda: not harness.saver.is_alive, "the end of the saver")
    assert not (Path(address) / paths.lease_name("main")).exists()
