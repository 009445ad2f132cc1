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
import os
import shutil
import subprocess
import sys
import tempfile
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


def run_one(path, test_id):
    """Run one test in this process. Return the exit code."""
    sys.path.insert(0, str(path.parent))
    suite = unittest.defaultTestLoader.loadTestsFromName(test_id)
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    return 0 if result.wasSuccessful() and not result.skipped else 1


def list_tests(path, names):
    """Return the ids of the tests of a file, as a child process finds them."""
    done = subprocess.run(
        [sys.executable, __file__, "--list", str(path), *names],
        env={**os.environ, "CKSTORE_SUITE_STORAGE": "torch"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [line[5:] for line in done.stdout.splitlines() if line.startswith("TEST ")], done.stderr


def outcome(path, test_id, storage, seconds):
    """Run one test in a process of its own. Return ``passed``, ``failed`` or ``timeout``, and its output."""
    # Not pytest and not through a pipe: ranks inherit what their parent has.
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, __file__, "--one", str(path), test_id]
        env = {**os.environ, "CKSTORE_SUITE_STORAGE": storage, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            state = "passed" if child.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            state = "timeout"
        output.seek(0)
        return state, output.read()


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
        ids, problem = list_tests(path, names)
        if not ids:
            print(f"{'-':>8} {'-':>8}  {file}: {problem.strip().splitlines()[-1:]}", flush=True)
        for test_id in ids:
            if arguments.k not in test_id:
                continue
            found = {}
            for storage in STORAGES:
                # What cannot pass with torch's own storage says nothing about ours.
                if found.get("torch", "passed") != "passed":
                    found[storage], output = "-", ""
                    continue
                found[storage], output = outcome(path, test_id, storage, arguments.seconds)
                counts[storage] += found[storage] == "passed"
            print(f"{found['torch']:>8} {found['ckstore']:>8}  {test_id}", flush=True)
            if found["torch"] == "passed" != found["ckstore"]:
                worse += 1
                print("\n".join(f"    {line}" for line in output.splitlines()[-30:]), flush=True)
    print(", ".join(f"{storage}: {count} passed" for storage, count in counts.items()))
    return worse


# Ranks are started by "spawn", which imports this file again under another name.
if "CKSTORE_SUITE_STORAGE" in os.environ:
    prepare(os.environ["CKSTORE_SUITE_STORAGE"])
if __name__ == "__main__":
    if sys.argv[1:2] == ["--list"]:
        sys.path.insert(0, str(Path(sys.argv[2]).parent))
        loaded = unittest.defaultTestLoader.loadTestsFromName(Path(sys.argv[2]).stem)
        print("\n".join(f"TEST {test_id}" for test_id in named(loaded, sys.argv[3:])))
    elif sys.argv[1:2] == ["--one"]:
        raise SystemExit(run_one(Path(sys.argv[2]), sys.argv[3]))
    else:
        raise SystemExit(main())
