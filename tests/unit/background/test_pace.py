"""A saver on a machine whose host takes processors away: it rests, within bounds, and at full speed elsewhere."""

from __future__ import annotations

import threading

import pytest

from ckstore.saver import pace as saver_pace
from ckstore.saver import priority as saver_priority
from ckstore.saver.pace import Pace, Taken

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


def test_where_nothing_is_taken_nobody_rests():
    host = Host(disk=0.0)
    pace = paced(host)
    seconds, taken = host.write(pace, 1000)
    assert seconds == pytest.approx(1000 * CHUNK_SECONDS)
    assert (taken, pace.share) == (0.0, 1.0)


@pytest.mark.parametrize("disk", [0.3, 0.6, 1.0])
def test_a_saver_soon_takes_next_to_nothing_from_training(disk):
    plain = Host(disk=disk)
    at_full_speed, without = plain.write(None, 1500)
    host = Host(disk=disk)
    pace = paced(host)
    # Two commits of 2 GB, in which it learns what is too fast, and three in which it is looked at.
    host.write(pace, 1000)
    seconds, taken = host.write(pace, 1500)
    assert taken < 0.1 * without
    # What it and the disk take must fit beside training: that much slower it has to be, and a little more.
    assert seconds < 1.8 * (1 + disk) * at_full_speed


def test_what_was_learnt_is_known_to_a_commit_that_comes_later():
    host = Host()
    pace = paced(host)
    host.write(pace, 1000)
    learnt = pace.share
    assert learnt < 0.8
    for _ in range(3):
        host.let_pass(600)
        host.write(pace, 100)
    host.let_pass(600)
    began = host.now
    assert pace.admits(0), "what came before is no reason to rest"
    assert host.now == began
    _, taken = host.write(pace, 100)
    assert pace.share == pytest.approx(learnt, rel=0.15)
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
def test_whoever_is_to_blame_a_commit_takes_about_twice_as_long_at_most(host):
    pace = paced(host)
    for _ in range(10):
        seconds, _ = host.write(pace, 500)
        assert seconds < 2.05 * 500 * CHUNK_SECONDS
        host.let_pass(300)


@pytest.mark.parametrize("rate", [0.005, 0.01, 0.018])
def test_a_little_that_is_always_taken_slows_nothing_down(rate):
    host = Host(disk=0.0, neighbours=rate)
    pace = paced(host)
    seconds, _ = host.write(pace, 5000)
    assert seconds == pytest.approx(5000 * CHUNK_SECONDS)
    assert pace.share == 1


@pytest.mark.parametrize("pause", [0.5, 60.0])
def test_what_is_taken_while_the_saver_is_in_a_hurry_or_idle_says_nothing(pause):
    host = Host(disk=0.0)
    pace = paced(host)
    for _ in range(5):
        host.write(pace, 100)
        host.stolen += 5.0
        host.let_pass(pause)
    assert pace.share == 1
    assert host.write(pace, 100)[0] == pytest.approx(100 * CHUNK_SECONDS)


def test_full_speed_comes_back_when_nothing_is_taken_any_more():
    host = Host()
    pace = paced(host)
    host.write(pace, 1000)
    assert pace.share < 1
    host.disk = 0.0
    host.write(pace, 5000)
    assert pace.share == 1
    assert host.write(pace, 500)[0] == pytest.approx(500 * CHUNK_SECONDS)


def test_a_hundredth_of_a_second_now_and_then_is_no_reason_to_rest():
    host = Host(disk=0.0)
    pace = paced(host)
    for _ in range(10):
        host.stolen += 0.011
        host.write(pace, 250)
    assert pace.share == 1


@pytest.mark.parametrize(("worked", "rest"), [(0.02, 0.02), (0.09, 0.09), (0.4, 0.0), (90.0, 0.0)])
def test_a_rest_is_as_long_as_the_work_at_most_and_only_a_chunk_is_followed_by_one(worked, rest):
    # What takes longer than a chunk had no processor, or was a whole task.
    host = Host(disk=0.0)
    pace = paced(host)
    pace.share = saver_pace.SHARE_MIN
    assert pace.admits(0)
    host.let_pass(worked)
    assert pace.admits(0) is not bool(rest)
    if rest:
        host.let_pass(rest - 1e-6)
        assert not pace.admits(0)
        host.let_pass(2e-6)
        assert pace.admits(0)


def test_each_thread_rests_after_its_own_work():
    host = Host(disk=0.0)
    pace = paced(host)
    pace.share = 0.5
    assert pace.admits(0)
    assert pace.admits(1)
    host.let_pass(0.01)
    assert not pace.admits(0)
    host.let_pass(0.02)
    assert pace.admits(0)
    assert not pace.admits(1), "it has worked for longer"


def test_where_looking_takes_long_it_is_done_less_often():
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


def test_a_thread_that_was_put_aside_while_it_looked_holds_up_nobody():
    host = Host()
    pace = paced(host)
    host.let_pass(1)
    assert pace._looking.acquire(blocking=False)
    admitted = []
    thread = threading.Thread(target=lambda: admitted.append(pace.admits(1)), daemon=True)
    thread.start()
    thread.join(20)
    assert admitted == [True]


def test_a_saver_in_a_hurry_does_not_ask(monkeypatch):
    class Refusing:
        def __init__(self, taken):
            assert taken() >= 0

        def admits(self, thread_index):
            return False

    monkeypatch.setattr(saver_priority, "Pace", Refusing)
    for name in ("setpriority", "sched_setscheduler"):
        monkeypatch.setattr(saver_priority.os, name, lambda *_: None)
    monkeypatch.setattr(saver_priority, "_autogroup_nice", lambda: None)
    priority = saver_priority.Priority(7)
    priority.give_way()
    assert not priority.headcount.admits(0)
    priority.hurry()
    assert priority.headcount.admits(0)
    careless = saver_priority.Priority(0)
    careless.give_way()
    assert careless.headcount.admits(0)


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
    monkeypatch.setattr(saver_pace.os, "sysconf", lambda _: 100)


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
def test_what_control_groups_and_the_machine_tell_adds_up(machine, membership, files, throttled):
    assert machine(membership, files)() == pytest.approx(66.90 + throttled)


@pytest.mark.usefixtures("ticks")
def test_a_group_from_which_nothing_was_taken_yet_is_looked_at_again(machine, tmp_path):
    taken = machine("0::/pod\n", {"pod/cpu.stat": V2_STAT.replace("250000", "0")})
    assert taken() == pytest.approx(66.90)
    (tmp_path / "cgroup/pod/cpu.stat").write_text(V2_STAT)
    (tmp_path / "proc/stat").write_text(CPU_LINE.replace("6690", "6700"))
    assert taken() == pytest.approx(67.25)


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("name", ["proc/stat", "cgroup/cpu.stat"])
def test_what_cannot_be_read_once_is_what_it_was(machine, tmp_path, name):
    taken = machine("0::/\n", {"cpu.stat": V2_STAT})
    first = taken()
    (tmp_path / name).rename(tmp_path / "away")
    assert taken() == first
    (tmp_path / "away").rename(tmp_path / name)
    assert taken() == first


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n", "cpu  1 2 3 4 5 6 7 x 9 10\n"])
def test_what_is_not_told_counts_as_nothing(machine, stat):
    assert machine("0::/\n", {}, stat)() == 0


def test_this_machine_tells_what_was_taken():
    first = Taken()()
    assert 0 <= first <= Taken()()
