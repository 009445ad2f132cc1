"""What saving costs inside training frameworks: ``python -m bench.frameworks [waits] [bytes]``.

``waits``: how long a save keeps the training loop, for the framework's own save, and for ckstore in the background and
in the foreground. Each figure is the call of the save plus what the next step takes longer than a median step. Every
side trains the same model (57 M parameters, 650 MiB of state with AdamW) in a process of its own, and sides take turns.
Training computes on half of the cores, unless ``--threads`` says otherwise, and the saver has the others: on all cores,
its low priority delays it until the next save, which waits for it. The frameworks' own saves are not synced to the
disk; ckstore's are.

``bytes``: the size of ten checkpoints of a small GPT that learns, as the Trainer of transformers saves them, and as
ckstore stores them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FRAMEWORKS = ("transformers", "accelerate", "lightning")
SIDES = ("own", "background", "foreground")
SAVES = 6
STEPS_BETWEEN = 4
"""Steps between two saves: about three seconds of training, so that the saver is idle again at the next save."""


def gpt(width: int, layers: int, vocabulary: int) -> Any:
    """Return a GPT-2 made from a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=width, n_layer=layers, n_head=8, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def sequences(count: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return texts that a model can learn: numbers that count up from different starts by different steps."""
    import torch

    rows = [(start * 7 + torch.arange(64) * (1 + start % 5)) % vocabulary for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Watch:
    """Times saves, and the steps between them."""

    def __init__(self) -> None:
        self.calls: list[float] = []
        self.steps: list[tuple[bool, float]] = []
        self._last = time.perf_counter()
        self._is_after_save = False

    def saved(self, call: Any, *args: Any, **options: Any) -> Any:
        """Call a save and time it."""
        began = time.perf_counter()
        result = call(*args, **options)
        self.calls.append(time.perf_counter() - began)
        self._last, self._is_after_save = time.perf_counter(), True
        return result

    def stepped(self) -> None:
        """Note the end of a step, before a save that may follow."""
        now = time.perf_counter()
        self.steps.append((self._is_after_save, now - self._last))
        self._last, self._is_after_save = now, False

    def waits(self) -> list[float]:
        """Return the seconds of each save but the first, which starts the saver, and the Trainer's own at the end."""
        usual = statistics.median(seconds for is_after, seconds in self.steps if not is_after)
        extra = [max(0.0, seconds - usual) for is_after, seconds in self.steps if is_after]
        return [call + more for call, more in zip(self.calls[1:SAVES], extra[1:SAVES], strict=True)]


def run_transformers(folder: str, side: str, watch: Watch) -> None:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import ckstore

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            watch.stepped()

    arguments = TrainingArguments(
        folder, max_steps=SAVES * STEPS_BETWEEN + 2, save_steps=STEPS_BETWEEN, per_device_train_batch_size=1,
        use_cpu=True, report_to=[], disable_tqdm=True, save_total_limit=2,
    )  # fmt: skip
    trainer = Trainer(gpt(768, 7, 8192), arguments, train_dataset=sequences(64, 8192), callbacks=[Steps()])
    if side != "own":
        ckstore.transformers.attach(trainer, background=side == "background")
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *args, **options: watch.saved(save, *args, **options)
    trainer.train()


def run_accelerate(folder: str, side: str, watch: Watch) -> None:
    """Train with accelerate."""
    import accelerate
    import torch

    import ckstore

    project = accelerate.utils.ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    if side != "own":
        ckstore.accelerate.attach(accelerator, background=side == "background")
    model = gpt(768, 7, 8192)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = [{name: row[None] for name, row in each.items()} for each in sequences(64, 8192)]
    for step in range(SAVES * STEPS_BETWEEN + 2):
        accelerator.backward(model(**batches[step % 64]).loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.stepped()
        if step % STEPS_BETWEEN == STEPS_BETWEEN - 1:
            watch.saved(accelerator.save_state)
    accelerator.end_training()


def run_lightning(folder: str, side: str, watch: Watch) -> None:
    """Train with Lightning."""
    import lightning.pytorch as lightning
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    import ckstore

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt(768, 7, 8192)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Steps(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            watch.stepped()

    saving = ModelCheckpoint(Path(folder) / "checkpoints", every_n_train_steps=STEPS_BETWEEN, save_top_k=-1)
    callbacks: list[Any] = [Steps(), saving]
    plugins: list[Any] = []
    if side != "own":
        plugins.append(ckstore.lightning.CheckpointIO(Path(folder) / "store", background=side == "background"))
        callbacks.append(ckstore.lightning.ExactResume())
    trainer = lightning.Trainer(
        max_steps=SAVES * STEPS_BETWEEN + 2, accelerator="cpu", callbacks=callbacks, plugins=plugins, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    save = trainer.save_checkpoint
    trainer.save_checkpoint = lambda *args, **how: watch.saved(save, *args, **how)  # type: ignore[method-assign]
    loader = torch.utils.data.DataLoader(sequences(64, 8192), batch_size=1)
    trainer.fit(Module(), loader)


def run_bytes(folder: str, side: str) -> None:
    """Save ten checkpoints of a small GPT, five steps apart, with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments, set_seed

    import ckstore

    set_seed(1)
    arguments = TrainingArguments(
        folder, max_steps=50, save_steps=5, per_device_train_batch_size=16, learning_rate=1e-3, adam_beta2=0.95,
        lr_scheduler_type="constant", use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(gpt(256, 4, 512), arguments, train_dataset=sequences(1024, 512))
    if side != "own":
        policy = ckstore.Policy(fidelity=ckstore.Residual.near()) if side == "near" else None
        ckstore.transformers.attach(trainer, policy=policy, background=False)
    trainer.train()


def nbytes_of(folder: str) -> int:
    """Return the size of all files below a folder, each inode once."""
    found = [(path, path.lstat()) for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
    spare = ("/ckstore/reserve/", "/ckstore/trash/")
    by_inode = {status.st_ino: status.st_size for path, status in found if not any(each in str(path) for each in spare)}
    return sum(by_inode.values())


def measured(*arguments: str, threads: int = 0) -> Any:
    """Run this module in a process of its own with a fresh folder; return what it prints."""
    with tempfile.TemporaryDirectory(prefix="ckstore-bench-") as folder:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "bench.frameworks",
            "--one",
            "--threads",
            str(threads),
            *arguments,
            folder,
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{arguments} failed: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def measure_one(what: str, side: str, folder: str, *, threads: int) -> None:
    """Measure one side in this process, and print the result as JSON."""
    if what == "bytes":
        run_bytes(folder, side)
        print(json.dumps(nbytes_of(folder)))
        return
    import torch

    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // 2))
    watch = Watch()
    {"transformers": run_transformers, "accelerate": run_accelerate, "lightning": run_lightning}[what](
        folder, side, watch
    )
    print(json.dumps(watch.waits()))


def print_waits(rounds: int, threads: int) -> None:
    """Print a table of what a save keeps the training loop waiting."""
    waits: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for framework in FRAMEWORKS:
            for side in SIDES:
                waits.setdefault((framework, side), []).extend(measured(framework, side, threads=threads))
    print(
        "| training waits for a save, s: median (least to most) | its own save | ckstore | ckstore, in the foreground |"
    )
    print("|---|--:|--:|--:|")
    for framework in FRAMEWORKS:
        cells = []
        for side in SIDES:
            values = waits[framework, side]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        print(f"| {framework} | {' | '.join(cells)} |")


def print_bytes() -> None:
    """Print a table of the size of ten checkpoints."""
    sizes = {side: measured("bytes", side) for side in ("own", "exact", "near")}
    print("| ten checkpoints of the Trainer | MB | share |")
    print("|---|--:|--:|")
    names = {"own": "its own files", "exact": "ckstore", "near": "ckstore, `Residual.near()`"}
    for side, nbytes in sizes.items():
        print(f"| {names[side]} | {nbytes / 1e6:.1f} | {100 * nbytes / sizes['own']:.0f} % |")


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description="Measure what saving costs inside training frameworks.")
    parser.add_argument("what", nargs="*", help="waits, bytes [default: both]")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each side of waits [default: 2]")
    parser.add_argument("--threads", type=int, default=0, help="threads of training in waits [default: half the cores]")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure_one(*given.what, threads=given.threads)
        return
    what = given.what or ["waits", "bytes"]
    if "waits" in what:
        print_waits(given.rounds, given.threads)
    if "bytes" in what:
        print_bytes()


if __name__ == "__main__":
    main()
