"""Jobs of real ranks: processes of one gloo group, forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

SECONDS_MAX = 240.0

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        # FSDP2 imports it for the first model, which takes a second.
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.nn.parallel",
        "ckstore.api",
        "ckstore.ranks.job",
    ]
)


class RankProcesses:
    """A running job.

    Args:
        target: A function of a module; called with the rank.
        world: Number of ranks.
        folder: A new folder for what the job's processes tell each other and their parent.
    """

    def __init__(self, target: Callable[[int], None], world: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        call = partial(_run, target=target, world=world, folder=str(folder))
        self._processes = [_context.Process(target=call, args=(rank,)) for rank in range(world)]
        for process in self._processes:
            process.start()

    def wait(self) -> None:
        """Wait for the end of all ranks. If one fails, kill the others and raise its error."""
        deadline = time.monotonic() + SECONDS_MAX
        while any(process.exitcode is None for process in self._processes):
            if time.monotonic() > deadline or any(process.exitcode for process in self._processes):
                break
            time.sleep(0.02)
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            # The others may have failed for the same reason. Their errors say it, too.
            time.sleep(1)
        self.kill()
        errors = [path.read_text() for path in sorted(self._folder.glob("error-*"))]
        assert codes == [0] * len(codes), "\n".join([f"exit codes {codes}", *errors])

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait_for(self, name: str) -> None:
        """Wait until every rank has called ``report`` with this name."""
        deadline = time.monotonic() + SECONDS_MAX
        while len(list(self._folder.glob(f"{name}-*"))) < len(self._processes):
            if time.monotonic() > deadline or any(process.exitcode is not None for process in self._processes):
                self.wait()
                raise AssertionError(f"the ranks ended without {name!r}")
            time.sleep(0.005)


def run_ranks(target: Callable[[int], None], world: int, folder: Path) -> None:
    """Run a job to its end; the arguments are those of ``RankProcesses``."""
    job = RankProcesses(target, world, folder)
    try:
        job.wait()
    finally:
        job.kill()


def report(name: str, rank: int, folder: str) -> None:
    """Tell the parent that a rank has come to a place of its program."""
    Path(folder, f"{name}-{rank}").touch()


def _run(rank: int, target: Callable[[int], None], world: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        target(rank)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
