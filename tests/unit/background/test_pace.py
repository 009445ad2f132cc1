"""A saver on a machine whose host takes processors away: it rests, within bounds, and works at full speed elsewhere.

What is asserted is how long commits take, and what they take from training; not by which steps that is found.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckstore.saver.pace import Pace, Taken
from ckstore.saver.priority import Priority
from support.saver_desk import SECONDS_MAX

CHUNK_SECONDS = 0.004
POLL_SECONDS = 0.004
PERIOD_SECONDS = 0.1
"""In which a host gives out the time of its processors, as Linux does."""


class Host:
    """A machine with two processors, whose host gives it no more time than that, in a time that tests make pass.

    Args:
        training: Processors that training wants.
        disk: Processors that the host takes for the disk, beside that of the saver, while a chunk is worked on.
        neighbours: Processors that others take from this machine at any time.
    """

    def __init__(self, *, training=1.0, disk=0.6, neighbours=0.0):
        self.training, self.disk, self.neighbours = training, disk, neighbours
        self.now, self.stolen = 1000.0, 0.0
        self._left, self._used = PERIOD_SECONDS, 0.0

    def monotonic(self):
        return self.now

    def taken(self):
        # In hundredths of a second, as /proc/stat has it.
        return int(100 * self.stolen) / 100

    def let_pass(self, seconds, *, is_busy=False):
        while seconds > 1e-12:
            part = min(seconds, self._left)
            saver = min(1.0, max(0.0, 2.0 - self.training)) + self.disk if is_busy else 0.0
            self._used += part * (self.training + saver)
            self.stolen += part * self.neighbours
            self.now, self._left, seconds = self.now + part, self._left - part, seconds - part
            if self._left <= 1e-12:
                self.stolen += max(0.0, self._used - 2.0 * PERIOD_SECONDS)
                self._left, self._used = PERIOD_SECONDS, 0.0

    def write(self, pace, count, *, seconds=CHUNK_SECONDS):
        """Write chunks on one thread; return for how long, and what was taken meanwhile."""
        began, before = self.now, self.stolen
        for _ in range(count):
            while pace is not None and not pace.admits(0):
                self.let_pass(POLL_SECONDS)
            self.let_pass(seconds, is_busy=True)
        return self.now - began, self.stolen - before


def paced(host):
    return Pace(host.taken, host)


def slowed_down(host):
    """Return a pace that has been given every reason to rest for as long as it may."""
    pace = paced(host)
    neighbours, host.neighbours = host.neighbours, 2.0
    host.write(pace, 1000)
    host.neighbours = neighbours
    return pace


def at_full_speed(count):
    """Return how long so many chunks take where nobody rests."""
    return pytest.approx(count * CHUNK_SECONDS)


def test_commit_takes_no_rests_where_nothing_is_taken():
    host = Host(disk=0.0)
    assert host.write(paced(host), 1000) == (at_full_speed(1000), 0.0)


@pytest.mark.parametrize("disk", [0.3, 0.6, 1.0])
def test_saver_soon_takes_next_to_nothing_from_training(disk):
    plain = Host(disk=disk)
    fastest, without = plain.write(None, 1500)
    host = Host(disk=disk)
    pace = paced(host)
    # Two commits of 2 GB, in which it finds out what is too fast, and three in which that is measured.
    host.write(pace, 1000)
    seconds, taken = host.write(pace, 1500)
    assert taken < 0.1 * without
    # What it and the disk take must fit beside training: that much slower it has to be, and a little more.
    assert seconds < 1.8 * (1 + disk) * fastest


def test_speed_that_was_found_is_that_of_a_commit_that_comes_later():
    host = Host()
    pace = paced(host)
    host.write(pace, 1000)
    found, _ = host.write(pace, 100)
    assert found > 100 * CHUNK_SECONDS / 0.8
    for _ in range(3):
        host.let_pass(600)
        host.write(pace, 100)
    host.let_pass(600)
    assert pace.admits(0), "what came before is no reason to rest"
    later, taken = host.write(pace, 100)
    assert later == pytest.approx(found, rel=0.15)
    assert taken < 0.03


class Neighbour(Host):
    """A host on which somebody else wants a processor for a fifth of a second, again and again."""

    def __init__(self, every_seconds):
        super().__init__(disk=0.0)
        self.every_seconds = every_seconds

    def let_pass(self, seconds, *, is_busy=False):
        self.neighbours = float(self.now % self.every_seconds < 0.2)
        super().let_pass(seconds, is_busy=is_busy)


@pytest.mark.parametrize(
    "host",
    [Host(training=2.0), Host(disk=0.0, neighbours=0.6), Host(disk=6.0), Neighbour(1), Neighbour(3), Neighbour(10)],
    ids=["training wants all", "neighbours", "a costly disk", "often", "now and then", "seldom"],
)
def test_commit_takes_about_twice_as_long_at_most_whatever_is_taken(host):
    pace = paced(host)
    for _ in range(10):
        seconds, _ = host.write(pace, 500)
        assert seconds < 2.05 * 500 * CHUNK_SECONDS
        host.let_pass(300)


@pytest.mark.parametrize("rate", [0.005, 0.01, 0.018])
def test_commit_is_not_slowed_down_by_a_little_that_is_always_taken(rate):
    host = Host(disk=0.0, neighbours=rate)
    assert host.write(paced(host), 5000)[0] == at_full_speed(5000)


@pytest.mark.parametrize("pause", [0.5, 60.0])
def test_commit_is_not_slowed_down_by_what_is_taken_while_the_saver_is_in_a_hurry_or_idle(pause):
    host = Host(disk=0.0)
    pace = paced(host)
    for _ in range(5):
        host.write(pace, 100)
        host.stolen += 5.0
        host.let_pass(pause)
    assert host.write(pace, 100)[0] == at_full_speed(100)


def test_commit_is_not_slowed_down_by_a_hundredth_of_a_second_now_and_then():
    host = Host(disk=0.0)
    pace = paced(host)
    for _ in range(10):
        host.stolen += 0.011
        assert host.write(pace, 250)[0] == at_full_speed(250)


def test_full_speed_comes_back_when_nothing_is_taken_any_more():
    host = Host(disk=0.0)
    pace = slowed_down(host)
    assert host.write(pace, 100)[0] > 1.5 * 100 * CHUNK_SECONDS
    host.write(pace, 5000)
    assert host.write(pace, 500)[0] == at_full_speed(500)


@pytest.mark.parametrize(("worked", "has_rest"), [(0.02, True), (0.09, True), (0.4, False), (90.0, False)])
def test_rest_is_as_long_as_the_work_at_most_and_follows_only_a_chunk(worked, has_rest):
    # What takes longer than a chunk had no processor, or was a whole task.
    host = Host(disk=0.0)
    pace = slowed_down(host)
    # A thread that has not worked yet owes nothing.
    assert pace.admits(1)
    host.let_pass(worked)
    assert pace.admits(1) is not has_rest
    if has_rest:
        host.let_pass(0.9 * worked)
        assert not pace.admits(1)
        host.let_pass(0.1 * worked)
        assert pace.admits(1)


def test_each_thread_rests_after_its_own_work():
    host = Host(disk=0.0)
    pace = slowed_down(host)
    assert pace.admits(1)
    assert pace.admits(2)
    host.let_pass(0.01)
    assert not pace.admits(1)
    host.let_pass(0.02)
    assert pace.admits(1)
    assert not pace.admits(2), "it has worked for longer"


def test_what_was_taken_is_read_less_often_where_reading_takes_long():
    host = Host(disk=0.0)
    looks = []

    def slowly():
        looks.append(host.now)
        host.let_pass(0.01)
        return 0.0

    pace = Pace(slowly, host)
    host.write(pace, 1000)
    assert len(looks) * 0.01 < 0.03 * 1000 * CHUNK_SECONDS
    assert len(looks) > 4


def test_thread_that_is_put_aside_while_it_reads_what_was_taken_holds_up_no_other():
    host, is_reading, may_go_on = Host(), threading.Event(), threading.Event()
    is_slow = []

    def slowly():
        if is_slow:
            is_reading.set()
            may_go_on.wait(SECONDS_MAX)
        return 0.0

    pace = Pace(slowly, host)
    host.let_pass(1)
    is_slow.append(True)
    reader = threading.Thread(target=pace.admits, args=(0,), daemon=True)
    reader.start()
    assert is_reading.wait(SECONDS_MAX)
    admitted = []
    other = threading.Thread(target=lambda: admitted.append(pace.admits(1)), daemon=True)
    other.start()
    other.join(20)
    may_go_on.set()
    assert admitted == [True]
    reader.join()


def test_priority_asks_its_pace_unless_it_is_in_a_hurry_or_need_not_give_way(monkeypatch):
    monkeypatch.setattr(Pace, "admits", lambda pace, thread_index: False)
    for name in ("setpriority", "sched_setscheduler"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(Path, "write_text", lambda *_: None)
    priority = Priority(7)
    priority.give_way()
    assert not priority.headcount.admits(0)
    priority.hurry()
    assert priority.headcount.admits(0)
    careless = Priority(0)
    careless.give_way()
    assert careless.headcount.admits(0)


# What the system tells


CPU_LINE = "cpu  147884 22807 61096 883435 30376 0 1024 6690 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
V1_STAT = "nr_periods 12\nnr_throttled 3\nthrottled_time 1500000000\nnr_bursts 0\nburst_time 0\n"
V2_STAT = "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods 12\nnr_throttled 3\nthrottled_usec 250000\n"
UNTHROTTLED = "usage_usec 9\nuser_usec 5\nsystem_usec 4\n"


@pytest.fixture
def machine(tmp_path):
    """A machine's files; call it with those that it has, and where this process belongs, to read them."""

    def read(membership, files, stat=CPU_LINE):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        cgroups.mkdir()
        (proc / "stat").write_text(stat)
        (proc / "self" / "cgroup").write_text(membership)
        for name, text in files.items():
            (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
            (cgroups / name).write_text(text)
        return Taken(proc, cgroups)

    return read


@pytest.fixture
def ticks(monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: 100)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize(
    ("membership", "files", "throttled"),
    [
        ("", {}, 0),
        ("0::/\n", {"cpu.stat": V2_STAT}, 0.25),
        ("0::/a/b\n", {"cpu.stat": UNTHROTTLED, "a/cpu.stat": V2_STAT, "a/b/cpu.stat": V2_STAT}, 0.5),
        ("0::/gone/b\n", {"cpu.stat": UNTHROTTLED, "gone/cpu.stat": V2_STAT}, 0.25),
        ("4:cpu:/\n5:cpu,cpuset:/\n", {"cpu/cpu.stat": V1_STAT}, 1.5),
        ("4:cpu:/\n0::/pod\n", {"cpu/cpu.stat": V1_STAT, "unified/pod/cpu.stat": V2_STAT}, 1.75),
        ("0::/../outside\n", {"cpu.stat": V2_STAT}, 0.25),
        ("0::/as/it/is/outside\n", {"cpu.stat": V2_STAT}, 0.25),
        ("4:cpu,cpuacct:/pod\n3:memory:/pod\n", {"cpu,cpuacct/pod/cpu.stat": V1_STAT, "memory/pod/x": ""}, 1.5),
        ("4:cpu:/\n0::/\n", {"cpu/cpu.stat": V1_STAT, "unified/cpu.stat": UNTHROTTLED}, 1.5),
        ("4:cpuset:/x\n", {"cpuset/x/cpu.stat": V1_STAT}, 0),
        ("0::/\n", {"cpu.stat": "throttled_usec many\n"}, 0),
        ("nonsense\n", {"cpu.stat": V2_STAT}, 0),
    ],
)
def test_taken_adds_up_what_control_groups_and_the_machine_tell(machine, membership, files, throttled):
    assert machine(membership, files)() == pytest.approx(66.90 + throttled)


@pytest.mark.usefixtures("ticks")
def test_taken_reads_again_a_group_from_which_nothing_was_taken_yet(machine, tmp_path):
    taken = machine("0::/pod\n", {"pod/cpu.stat": V2_STAT.replace("250000", "0")})
    assert taken() == pytest.approx(66.90)
    (tmp_path / "cgroup/pod/cpu.stat").write_text(V2_STAT)
    (tmp_path / "proc/stat").write_text(CPU_LINE.replace("6690", "6700"))
    assert taken() == pytest.approx(67.25)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("name", ["proc/stat", "cgroup/cpu.stat"])
def test_taken_is_what_it_was_where_it_cannot_be_read_once(machine, tmp_path, name):
    taken = machine("0::/\n", {"cpu.stat": V2_STAT})
    first = taken()
    (tmp_path / name).rename(tmp_path / "away")
    assert taken() == first
    (tmp_path / "away").rename(tmp_path / name)
    assert taken() == first


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n", "cpu  1 2 3 4 5 6 7 x 9 10\n"])
def test_taken_counts_what_is_not_told_as_nothing(machine, stat):
    assert machine("0::/\n", {}, stat)() == 0


def test_taken_of_this_machine_never_goes_back():
    first = Taken()()
    assert 0 <= first <= Taken()()
