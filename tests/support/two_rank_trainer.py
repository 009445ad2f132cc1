"""A trainer on two ranks, undisturbed and then resumed: ``torchrun --nproc-per-node 2 two_rank_trainer.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers

import ckstore
from support.small_trainers import losses_of, make_trainer


class DrawsByRank(transformers.TrainerCallback):
    """The ranks draw different random numbers, as they do where their data differ. Otherwise their states are equal."""

    def on_step_end(self, args, state, control, **_):
        torch.rand(1 + args.process_index)


def main(folder):
    options = {"ddp_backend": "gloo", "max_steps": 6, "save_total_limit": 2, "load_best_model_at_end": True}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    runs = []
    # The newest but one, then the newest.
    for resume in (None, "seq:1", True):
        trainer = make_trainer("gpt2", folder / "out", **options, **evaluation)
        trainer.add_callback(DrawsByRank())
        ckstore.transformers.attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        weights = sum(float(tensor.double().abs().sum()) for tensor in trainer.model.state_dict().values())
        runs.append([losses_of(trainer), weights])
    trainer = make_trainer("gpt2", folder / "empty", ddp_backend="gloo")
    ckstore.transformers.attach(trainer)
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        runs.append(str(error))
    (folder / f"rank-{torch.distributed.get_rank()}.json").write_text(json.dumps(runs))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
