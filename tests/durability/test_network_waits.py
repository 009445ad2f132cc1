"""Protects training: ``commit_async`` on many ranks waits for no other rank, neither itself nor through a thread.

All processes of the other rank are stopped during the call. So a call that waits for an answer does not return.
"""

from __future__ import annotations

import pytest

from support.strace_sweep import fast_folder
from support.traced_ranks import network_waits, traced_job

pytestmark = pytest.mark.usefixtures("strace")

RETURN_SECONDS = 12.0
"""Below the 15 s after which a stopped rank is given up: until then, only an answer ends a wait."""


@pytest.fixture
def base(tmp_path):
    with fast_folder(tmp_path) as folder:
        yield folder


def called_while_others_are_stopped(ranks, at, step, trace, seconds=RETURN_SECONDS):
    """Have one rank begin a commit while the other is stopped.

    Returns:
        Its answer, None if the call has not returned; and the calls that can wait for the other.
    """
    (other,) = (rank for rank in ranks if rank is not ranks[at])
    with ranks[at].traced(trace), other.stopped():
        ranks[at].ask(do="begin", step=step)
        answer = ranks[at].answer(seconds)
    return answer, network_waits(trace.read_text(errors="replace"), ranks[at].pid)


def test_commit_async_waits_for_no_other_rank(base):
    with traced_job(base / "store") as ranks:
        for at in range(len(ranks)):
            step = 3 + at
            answer, waits = called_while_others_are_stopped(ranks, at, step, base / f"trace-{at}")
            assert answer is not None, f"commit_async of rank {at} waits for rank {1 - at}"
            assert waits == []
            ranks[1 - at].ask(do="begin", step=step)
            assert ranks[1 - at].answer() is not None
            for rank in ranks:
                rank.ask(do="result")
            assert [rank.answer()["seq"] for rank in ranks] == [step - 1] * 2


def test_a_wait_in_commit_async_is_found(base):
    with traced_job(base / "store") as ranks:
        ranks[1].ask(do="install", fault="bytes")
        answer, waits = called_while_others_are_stopped(ranks, 1, 3, base / "bytes")
        assert answer is not None
        assert waits
        ranks[0].ask(do="begin", step=3)
        for rank in ranks:
            rank.ask(do="result")
        assert ranks[0].answer() is not None
        assert [rank.answer()["seq"] for rank in ranks] == [2, 2]
        ranks[1].ask(do="install", fault="answer")
        assert called_while_others_are_stopped(ranks, 1, 4, base / "answer", seconds=2.0) == (None, None)
        ranks[1].kill()
