"""Run torch's own tests of torch.distributed.checkpoint with ckstore in place of its files.

    python tests/judges/torch_dcp.py PATH [-k WORD] [--seconds 180]

PATH is ``test/distributed/checkpoint`` of a checkout of pytorch at the installed version; nothing of it is part of
ckstore. Every test in ``TESTS`` runs twice: first with torch's FileSystemWriter and Reader, which shows whether it can
pass on this machine, then with ``ckstore.dcp.Writer`` and ``Reader``. The exit code is the number of tests that pass
only with torch's. Needs ``pip install expecttest``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path

TESTS = {
    "test_file_system_checkpoint_cpu.py": (
        "TestDistributedStateDictSaveLoad.test_read_write_only_tensor",
        "TestDistributedStateDictSaveLoadWithSharedTensor.test_read_write_shard_tensor",
        "TestDistributedReshardOnLoad.test_load_with_different_shard_plan",
        "TestDistributedReshardOnLoad.test_load_rowwise_to_colwise",
        "TestDistributedReshardOnLoad.test_save_load_bytes",
        "TestDistributedReshardOnLoad.test_switch_between_sharded_tensor_to_tensor",
    ),
    "test_dtensor_resharding.py": (
        "TestDTensorReshardPlacementChange",
        "TestDTensorReshardMeshChange",
        "TestCheckpointableReshard",
    ),
    "test_dtensor_checkpoint.py": ("DTensorPlanner.test_distributed_tensor_planner",),
    "test_tp_checkpoint.py": ("TestTpCheckpoint.test_tp_checkpoint",),
    "test_hsdp_checkpoint.py": ("TestHSDPCheckpoint",),
    "test_fsdp_tp_checkpoint_conversion.py": ("TestFsdpTpCheckpointConversion.test_fsdp_to_tp",),
    "test_2d_fsdp_dt_checkpoint.py": ("Test2dFsdpDtCheckpoint",),
    "e2e/test_e2e_save_and_load.py": (
        "TestE2ESaveAndLoad",
        "TestCheckpointOrderingAndOverwrite",
        "TestInitStateDict",
    ),
    "e2e/test_pipeline.py": ("TestPipeline.test_pipeline",),
    "e2e/test_fine_tuning.py": ("TestFineTuning.test_fine_tuning",),
    "test_compatibility.py": ("TestDCPCompatbility.test_storage_meta",),
    "test_checkpoint.py": ("TestDistributedFailure",),
    "test_async_process_executor.py": ("",),
}
"""The tests that are about storage, by file; a class or the begin of a name means all of it."""

STORAGES = ("torch", "ckstore")


def no_skip(*arguments, **options):
    """Stand for a decorator that skips without GPUs."""
    return lambda function: function


def with_temp_dir(function):
    """Give a test a folder that all ranks share, and remove it when all of them have ended."""

    @functools.wraps(function)
    def wrapped(self, *arguments, **options):
        import torch.distributed as dist

        is_first = not dist.is_initialized() or dist.get_rank() == 0
        found = [tempfile.mkdtemp() if is_first else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        self.temp_dir = found[0]
        try:
            function(self, *arguments, **options)
            if dist.is_initialized():
                dist.barrier()
        finally:
            if is_first:
                shutil.rmtree(self.temp_dir, ignore_errors=True)

    return wrapped


def prepare(storage):
    """Replace what needs GPUs, and torch's storage by ckstore's. Every rank runs this when it starts."""
    import torch
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import checkpoint_utils
    from torch.testing._internal.distributed._tensor import common_dtensor

    for module in (common_distributed, common_dtensor):
        for name in ("skip_if_lt_x_gpu", "requires_accelerator_dist_backend", "requires_nccl"):
            if hasattr(module, name):
                setattr(module, name, no_skip)
    checkpoint_utils.with_temp_dir = with_temp_dir

    def fork_ranks(self):
        """Start ranks as forks: importing torch takes longer than most tests."""
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    common_distributed.MultiProcessTestCase._spawn_processes = fork_ranks
    init_pg = common_dtensor.DTensorTestBase.init_pg

    def init_cpu_group(self, eager_init, backend=None):
        """Make a group of gloo also where a test names one backend for CPUs and one for the device."""
        init_pg(self, eager_init, "gloo")

    if not torch.cuda.is_available():
        common_dtensor.DTensorTestBase.init_pg = init_cpu_group
    torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *arguments, **options: self
    if storage == "ckstore":
        writer, reader = classes()
        for module in (torch_dcp, _storage_utils, filesystem):
            module.FileSystemWriter, module.FileSystemReader = writer, reader


@functools.cache
def classes():
    """Return a writer and a reader that take the arguments of torch's."""
    return SuiteWriter, SuiteReader


if os.environ.get("CKSTORE_SUITE_STORAGE") == "ckstore":
    from ckstore.dcp import Reader, Writer

    class SuiteWriter(Writer):
        """Takes the arguments of torch's FileSystemWriter; of these, only ``overwrite`` means something here."""

        def __init__(self, path, *arguments, overwrite=True, **options):
            super().__init__(path)
            self._may_overwrite = overwrite

        def prepare_local_plan(self, plan):
            """Refuse a second checkpoint as torch's writer does."""
            if not self._may_overwrite:
                with contextlib.suppress(LookupError):
                    Reader(self.checkpoint_id).read_metadata()
                    raise RuntimeError(f"Checkpoint already exists and self.overwrite={self._may_overwrite}.")
            return super().prepare_local_plan(plan)

    class SuiteReader(Reader):
        """Takes the arguments of torch's FileSystemReader."""

        def __init__(self, path, *arguments, **options):
            super().__init__(path)


def mix_faults(module):
    """Let the writer of torch's tests of failures save to a store, with the same faults."""
    import torch

    class FaultyWriter(module.TestStorageBase, SuiteWriter):
        """Fails on chosen ranks, else saves."""

        def __init__(self, fail_conf):
            module.TestStorageBase.__init__(self, fail_conf)
            # Without a group, each process saves alone.
            store = "all" if torch.distributed.is_initialized() else str(os.getpid())
            SuiteWriter.__init__(self, f"{os.environ['CKSTORE_SUITE_FOLDER']}/{store}")

        def set_up_storage_writer(self, *arguments, **options):
            """Fail or begin."""
            self._fail_rank("fail_set_up_storage_writer")
            super().set_up_storage_writer(*arguments, **options)

        def prepare_local_plan(self, plan):
            """Fail or return the plan."""
            self._fail_rank("fail_prepare_local_plan")
            return super().prepare_local_plan(plan)

        def prepare_global_plan(self, plans):
            """Fail or return the plans."""
            self._fail_rank("fail_prepare_global_plan")
            return super().prepare_global_plan(plans)

        def write_data(self, plan, planner):
            """Fail now or in the future, or write."""
            self._fail_rank("fail_write_data")
            return self._fail_rank_async("fail_write_data_async", super().write_data(plan, planner).value())

        def finish(self, metadata, results):
            """Fail or publish."""
            self._fail_rank("fail_finish")
            super().finish(metadata, results)

    module.FaultyStorageWriter = FaultyWriter


def named(suite, names):
    """Return the ids of the tests whose class and name begin like one of these."""
    found = []
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            found += named(each, names)
        else:
            short = each.id().partition(".")[2]
            # Parametrized and device-specific tests have longer names.
            if any(_fits(short, name) for name in names):
                found.append(each.id())
    return found


def _fits(short, name):
    kind, _, test = name.partition(".")
    found_kind, _, found_test = short.partition(".")
    return found_kind.startswith(kind) and found_test.startswith(test)


def run_here(test_id, output):
    """Run one test in this forked process. Never returns."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.environ["CKSTORE_SUITE_FOLDER"] = tempfile.mkdtemp()
    code = 1
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName(test_id)
        result = unittest.TextTestRunner(verbosity=2, stream=sys.stderr).run(suite)
        code = 0 if result.wasSuccessful() and not result.skipped else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def outcome(test_id, seconds):
    """Run one test in a fork of this process. Return ``passed``, ``failed`` or ``timeout``, and its output."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            run_here(test_id, output)
        until = time.monotonic() + seconds
        state = None
        while state is None:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                state = "passed" if status == 0 else "failed"
            elif time.monotonic() > until:
                state = "timeout"
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            else:
                time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        output.seek(0)
        return state, output.read()


def run_file(path, names, word, seconds):
    """Run the tests of a file in forks of this process, which has imported torch already, and report each."""
    sys.path.insert(0, str(path.parent))
    if path.stem == "test_checkpoint" and os.environ["CKSTORE_SUITE_STORAGE"] == "ckstore":
        mix_faults(importlib.import_module(path.stem))
    ids = named(unittest.defaultTestLoader.loadTestsFromName(path.stem), names)
    for test_id in ids:
        if word in test_id:
            state, output = outcome(test_id, seconds)
            print(json.dumps([test_id, state, output[-3000:]]), flush=True)


def results_of(path, names, storage, arguments):
    """Yield the id, the outcome and the output of each test of a file with one storage."""
    command = [sys.executable, __file__, "--file", str(path), arguments.k, str(arguments.seconds), *names]
    env = {**os.environ, "CKSTORE_SUITE_STORAGE": storage, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
    if done.returncode:
        yield path.stem, "failed", done.stderr[-3000:]


def main():
    """Run all tests and print the table. Return the number of tests that only torch's storage passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("-k", default="", help="run only tests with this word in their name")
    parser.add_argument("--seconds", type=float, default=180, help="limit for one test")
    arguments = parser.parse_args()
    worse = 0
    counts = dict.fromkeys(STORAGES, 0)
    print(f"{'torch':>8} {'ckstore':>8}  test", flush=True)
    for file, names in TESTS.items():
        path = arguments.path / file
        if not path.exists():
            print(f"{'-':>8} {'-':>8}  {file}: not in this folder", flush=True)
            continue
        found = {storage: {} for storage in STORAGES}
        for storage in STORAGES:
            for test_id, state, output in results_of(path, names, storage, arguments):
                found[storage][test_id] = state, output
                counts[storage] += state == "passed"
        for test_id in dict.fromkeys(test_id for results in found.values() for test_id in results):
            (theirs, _), (ours, output) = (found[storage].get(test_id, ("-", "")) for storage in STORAGES)
            print(f"{theirs:>8} {ours:>8}  {test_id}", flush=True)
            if theirs == "passed" != ours:
                worse += 1
                print("\n".join(f"    {line}" for line in output.splitlines()[-40:]), flush=True)
    print(", ".join(f"{storage}: {count} passed" for storage, count in counts.items()))
    return worse


# A process that torch starts by "spawn" imports this file again under another name.
if "CKSTORE_SUITE_STORAGE" in os.environ:
    prepare(os.environ["CKSTORE_SUITE_STORAGE"])
if __name__ == "__main__":
    if sys.argv[1:2] == ["--file"]:
        run_file(Path(sys.argv[2]), sys.argv[5:], sys.argv[3], float(sys.argv[4]))
    else:
        raise SystemExit(main())
