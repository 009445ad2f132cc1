"""Run a framework's own checkpoint tests with ckstore in place of its files.

    python tests/judges/run.py accelerate PATH
    python tests/judges/run.py lightning PATH
    python tests/judges/run.py transformers PATH

PATH is a checkout of the framework's sources that fits the installed version; nothing of it is part of ckstore. What is
left out is in ``EXCLUDED``, with the reason. The exit code is that of pytest. Lightning's tests need ``pip install
cloudpickle scikit-learn omegaconf jsonargparse pytest-rerunfailures pytest-random-order tensorboardX``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

FILES = {
    "accelerate": ("tests/test_state_checkpointing.py",),
    "lightning": tuple(
        f"tests/tests_pytorch/{name}.py"
        for name in (
            "checkpointing/test_model_checkpoint",
            "checkpointing/test_trainer_checkpoint",
            "checkpointing/test_checkpoint_callback_frequency",
            "checkpointing/test_torch_saving",
            "plugins/test_checkpoint_io_plugin",
            "plugins/test_async_checkpoint",
            "trainer/connectors/test_checkpoint_connector",
            "models/test_restore",
            "callbacks/test_model_checkpoint_additional_cases",
            "callbacks/test_model_checkpoint_edge_cases",
            "callbacks/test_model_checkpoint_manual_opt",
            "callbacks/test_model_checkpoint_step_interval_val_metric",
        )
    ),
    "transformers": ("tests/trainer/test_trainer_checkpointing.py",),
}
"""The test files of each framework."""

SOURCES = {"accelerate": (), "lightning": ("src", "tests"), "transformers": ()}
"""Folders of the checkout that are imported from."""

EXCLUDED: dict[str, dict[str, str]] = {
    "accelerate": {},
    "lightning": {
        f"tests/tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py::{name}": "counts the calls of a "
        "mocked torch.save"
        for name in ("test_default_checkpoint_freq", "test_top_k")
    },
    "transformers": {
        f"tests/trainer/test_trainer_checkpointing.py::{name}": "downloads from the hub"
        for name in (
            "TrainerCheckpointSaveTest::test_save_collator_tokenizer_by_default",
            "TrainerResumeTrainingTest::test_multiple_peft_adapters",
            "TrainerSavingTest::test_trainer_saves_feature_extractor",
            "TrainerSavingTest::test_trainer_saves_image_processor",
            "TrainerSavingTest::test_trainer_saves_processor",
            "TrainerSavingTest::test_trainer_saves_tokenizer",
        )
    },
}
"""Tests that cannot hold with ckstore, or not without a network: their names, and why."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a framework's own checkpoint tests with ckstore.")
    parser.add_argument("framework", choices=sorted(FILES))
    parser.add_argument("path", type=Path, help="a checkout of the framework's sources")
    given, more = parser.parse_known_args()
    for name, reason in EXCLUDED[given.framework].items():
        print(f"left out: {name}: {reason}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", f"ckstore_{given.framework}", "-p", "no:cacheprovider"]
    command += [f"--deselect={name}" for name in EXCLUDED[given.framework]]
    command += [*FILES[given.framework], *more]
    sources = [str(given.path.resolve() / name) for name in SOURCES[given.framework]]
    paths = [str(HERE), *sources, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=given.path, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
