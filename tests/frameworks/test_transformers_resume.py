"""A Trainer resumes from a store as if it had never stopped: every later loss and every later checkpoint is equal."""

from __future__ import annotations

import pytest

import ckstore
from support.small_trainers import differences, losses_of, make_trainer

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def run(kind, folder, *, resume=None, background=False, **options):
    trainer = make_trainer(kind, folder, **options)
    ckstore.transformers.attach(trainer, background=background)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


CASES = {
    "gpt2": {"max_steps": 6, "per_device_train_batch_size": 12},  # one and a half epochs
    "moe": {"max_steps": 4},
    "t5": {"max_steps": 4},
    "lora": {"max_steps": 4},
    "frozen": {"max_steps": 4},
    "accumulation": {"max_steps": 4, "gradient_accumulation_steps": 3},
    "epoch": {"save_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1, "per_device_train_batch_size": 12},
}


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_undisturbed_run(case, tmp_path):
    if case == "lora":
        pytest.importorskip("peft", reason="peft is not installed")
    kind = case if case in ("moe", "t5", "lora", "frozen") else "gpt2"
    undisturbed = run(kind, tmp_path, **CASES[case])
    with ckstore.open(tmp_path / "ckstore") as store:
        last, first = store.log()[:2]
        expected = store.restore(f"seq:{last.seq}")
        resumed = run(kind, tmp_path, resume=f"seq:{first.seq}", **CASES[case])
        assert losses_of(resumed) == losses_of(undisturbed)
        assert len(losses_of(resumed)) == last.step > first.step
        again = store.log()[0]
        assert again.step == last.step
        assert again.seq > last.seq
        assert again.bytes_written == 0
        assert differences(expected, store.restore(f"seq:{again.seq}")) == []
