"""Trainers that are killed: a warm process that has imported transformers forks one child for each life of a trainer.

``python -m support.killed_trainers`` reads one JSON object per line: ``{"train": {...}}`` forks a trainer and answers
with its pid; ``{"wait": pid}`` answers with its status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).parent.parent


class Warm:
    """The warm process, as its parent sees it."""

    def __init__(self):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "support.killed_trainers"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen(command, cwd=TESTS, env=environment, **pipes)

    def ask(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def train(folder, journal, *, resume, steps, stops_at=None, is_control=False):
    """Train, and append to the journal: where training starts, when a save begins, and each loss.

    Args:
        folder: Where the trainer saves.
        journal: A file.
        resume: Resume from the newest checkpoint.
        steps: Length of the whole run.
        stops_at: Be killed in the save of this step.
        is_control: Choose what to resume from as transformers does.
    """
    import transformers

    import ckstore
    from support.small_trainers import make_trainer

    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(*words):
        os.write(file, (" ".join(map(str, words)) + "\n").encode())

    class Journal(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            note("start", state.global_step)

        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                note("loss", state.global_step, logs["loss"])

    trainer = make_trainer("gpt2", folder, max_steps=steps, save_total_limit=2)
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.add_callback(Journal())
    ckstore.transformers.attach(trainer)
    pointers = trainer._ckstore.pointers
    announce = pointers.announce

    def noted(step, path):
        note("save", step)
        announce(step, path)
        if step == stops_at:
            pointers.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    pointers.announce = noted
    if is_control:
        # The rule of transformers: the folder with the highest number.
        trainer._ckstore.folders.to_resume = lambda _: transformers.trainer_utils.get_last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=resume or None)
    note("end", trainer.state.global_step)


def serve():
    # Forked children need not import these again.
    for name in ("transformers.models.gpt2.modeling_gpt2", "ckstore.transformers", "support.small_trainers"):
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            print(os.waitpid(command["wait"], 0)[1], flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                output = os.open(command["train"]["journal"] + ".txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                train(**command["train"])
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
