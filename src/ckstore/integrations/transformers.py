"""The door into the ``Trainer`` of transformers: ``attach(trainer)`` makes it save into a store and resume from it.

``attach`` replaces the class of the trainer by a subclass of that class, ``_StoreTrainer`` first. It overrides the
methods that write and read checkpoints; training and the choice of what to keep remain those of transformers.

How a checkpoint is saved. transformers' own ``_save_checkpoint`` runs. What it would write as files of tensors is
collected instead, and committed when it returns; small files stay in ``checkpoint-N`` and go into the commit as well.
transformers' rule of rotation is applied once the commit is durable, and what it removed is deleted in the store.

Invariants:
- A folder ``checkpoint-N`` has a pointer before it has anything else.
- Weights, optimizer and random states are restored strictly from the store: what does not fit is refused.
- Rank 0 commits. Every rank restores by itself.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from transformers import trainer_utils

from ckstore.errors import CapacityError, CkstoreError, NotFoundError, UsageError
from ckstore.integrations.checkpoint_folders import FILES, CheckpointFolders
from ckstore.integrations.hub_uploads import uploads_without
from ckstore.integrations.model_parts import has_adapters, model_parts, put_adapters
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import POINTER_NAME, is_pointer
from ckstore.integrations.random_states import gather_rng, put_own_rng, rank_and_size
from ckstore.integrations.signatures import check_signatures

if TYPE_CHECKING:
    from ckstore.config import Policy

_log = logging.getLogger("ckstore")

TESTED = ("5.24.0",)

_SIGNATURES = {
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
    "_finish_current_push": ("self",),
    "_get_output_dir": ("self", "trial"),
    "_load_best_model": ("self",),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_rng_state": ("self", "checkpoint"),
    "_load_scaler": ("self", "checkpoint"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_save": ("self", "output_dir", "state_dict"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_save_rng_state": ("self", "output_dir"),
    "_save_scaler": ("self", "output_dir"),
    "push_to_hub": ("self", "commit_message", "blocking", "token", "revision", "private", "kwargs"),
    "save_model": ("self", "output_dir", "_internal_call"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
_ROTATION = ("output_dir", "save_total_limit", "best_model_checkpoint", "use_mtime", "checkpoint_prefix")

_NOT_A_METRIC = re.compile(r"step|.*_runtime|.*_per_second")
"""Entries of the trainer's log that say nothing about the model."""


def attach(
    trainer: transformers.Trainer,
    store: str | os.PathLike[str] | None = None,
    *,
    run: str = "main",
    policy: Policy | None = None,
    background: bool = True,
    files: Literal["pointer", "both"] = "pointer",
) -> None:
    """Make a trainer save its checkpoints into a store, and resume from it. Does nothing the second time.

    ``trainer.train(resume_from_checkpoint=True)`` then continues from the newest durable checkpoint of the store. A
    path of a ``checkpoint-N`` and a reference such as ``"seq:7"``, ``"best:eval_loss"`` or a tag work as well.

    Args:
        trainer: A ``Trainer``, or an object of a subclass.
        store: Folder or URL of the store; created on first save. None: ``ckstore`` in the trainer's ``output_dir``.
        run: The run of the store. Letters, digits, ``.``, ``_`` and ``-``.
        policy: How checkpoints are stored; None: exactly.
        background: Commit in the background. A store in a bucket always commits in the foreground.
        files: What ``checkpoint-N`` holds: ``"pointer"``: a pointer to the checkpoint and small files; ``"both"``: the
            weight files of transformers as well, for programs that open them.

    Raises:
        UsageError: An option of the trainer or an argument cannot be used.
        UnsupportedError: The installed version of transformers is not supported.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise UsageError(f"a {type(trainer).__name__} is not a Trainer of transformers", where="attach(trainer)")
    if files not in ("pointer", "both"):
        raise UsageError("files must be 'pointer' or 'both'", where=f"attach(trainer, files={files!r})")
    address = str(Path(_output_dir(trainer), "ckstore")) if store is None else os.fspath(store)
    made_by = f"transformers {transformers.__version__}"
    pointers = PointerStore.at(address, run=run, policy=policy, background=background, made_by=made_by)
    if isinstance(trainer, _StoreTrainer):
        if store is not None:
            _require_same(trainer._ckstore.pointers, pointers)
        return
    if reason := _not_served(trainer):
        _log.warning("%s: transformers saves and loads the checkpoints itself, without ckstore", reason)
        return
    _check_options(trainer.args)
    version: dict[str, Any] = {"library": "transformers", "version": transformers.__version__, "tested": TESTED}
    check_signatures(transformers.Trainer, _SIGNATURES, **version)
    check_signatures(trainer_utils, {"rotate_checkpoints": _ROTATION}, **version)
    own = type(trainer)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    door = _Door(trainer, pointers, writes_weights=files == "both")
    trainer.__dict__["_ckstore"] = door
    trainer.__class__ = type(own.__name__, (_StoreTrainer, own), names)
    trainer.add_callback(_Between(door))


def _output_dir(trainer: Any) -> str:
    return str(trainer.args.output_dir)


def _require_same(attached: PointerStore, wanted: PointerStore) -> None:
    if (attached.address, attached.run) != (wanted.address, wanted.run):
        raise UsageError(
            f"the trainer is attached to run {attached.run} of {attached.address} already",
            where=f"attach(trainer, {wanted.address!r}, run={wanted.run!r})",
            todo="make a new trainer",
        )


def _not_served(trainer: Any) -> str | None:
    """Return what keeps a trainer from being served; None: nothing."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed is on"
    if trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled:
        return "FSDP is on"
    if trainer.is_distributed_loading_by_transformers or any(
        hasattr(parameter, "placements") for parameter in trainer.model.parameters()
    ):
        return "the model is sharded over several devices"
    if transformers.utils.is_torch_xla_available():
        return "torch_xla is on"
    if transformers.utils.is_sagemaker_mp_enabled():
        return "SageMaker model parallelism is on"
    return None


def _check_options(args: Any) -> None:
    if args.enable_jit_checkpoint:
        raise UsageError(
            "enable_jit_checkpoint saves in the middle of a step, so its checkpoint cannot be resumed exactly",
            where="TrainingArguments",
            todo="leave it out, and use a smaller save_steps: a save in the background hardly holds up training",
        )
    if args.save_on_each_node and args.world_size > 1:
        raise UsageError(
            "save_on_each_node lets several nodes write the same run",
            where="TrainingArguments",
            todo="leave it out, and give attach a store that all nodes can read",
        )


class _Door:
    """What an attached trainer has in addition: its store, the state being collected, and what waits to be rotated.

    Args:
        trainer: The trainer.
        pointers: Its store.
        writes_weights: Also write the weight files of transformers.
    """

    def __init__(self, trainer: Any, pointers: PointerStore, *, writes_weights: bool) -> None:
        self.trainer = trainer
        self.pointers = pointers
        self.writes_weights = writes_weights
        self.folders = CheckpointFolders(Path(_output_dir(trainer)), pointers)
        self.draft: dict[str, Any] | None = None
        self.folder: Path | None = None
        self.limit: int | None = None
        self._rotation: Literal["by time", "by step"] | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this rank commits."""
        return bool(self.trainer.is_world_process_zero())

    # Save

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Collect what is saved inside this context, and commit it at the end."""
        step = self.trainer.state.global_step
        folder = self.folders.of_step(step)
        if self.is_writer:
            self.settle()
            self.folders.begin(step)
        self.draft, self.folder, self.limit = {}, folder, self.trainer.args.save_total_limit
        try:
            # Nothing is rotated before the new checkpoint is durable.
            with self.rotation_limit(None):
                yield
            if self.is_writer:
                self.folders.save(self.draft, step, self._metrics())
                self._rotation = "by time"
                self.settle()
        except BaseException:
            if self.is_writer:
                self.folders.abandon(step)
            raise
        finally:
            self.draft = None

    @property
    def exports(self) -> Path:
        """Folder for files that are uploaded. transformers leaves out names with ``_`` when it uploads the rest."""
        return Path(_output_dir(self.trainer)) / "_ckstore_push"

    def uploads(self) -> contextlib.AbstractContextManager[None]:
        """Let uploads leave out the store."""
        return uploads_without(self.pointers.address, _output_dir(self.trainer), transformers.trainer)

    @contextlib.contextmanager
    def rotation_limit(self, limit: int | None) -> Iterator[None]:
        """Have ``save_total_limit`` this value inside the context."""
        args = self.trainer.args
        before, args.save_total_limit = args.save_total_limit, limit
        try:
            yield
        finally:
            args.save_total_limit = before

    def _metrics(self) -> dict[str, float]:
        state = self.trainer.state
        logged = (entry for entry in state.log_history if entry.get("step") == state.global_step)
        return {
            name: float(value)
            for entry in logged
            for name, value in entry.items()
            if isinstance(value, int | float) and math.isfinite(value) and not _NOT_A_METRIC.fullmatch(name)
        }

    def settle(self, *, waits: bool = False) -> None:
        """Settle the pointers of commits that have ended; rotate once everything is durable.

        Raises:
            CkstoreError: A commit failed. The folder of its checkpoint is removed.
        """
        try:
            if waits:
                self.pointers.wait()
            else:
                self.pointers.poll()
        finally:
            self.folders.settle()
        if self.pointers.is_settled and self._rotation is not None:
            is_by_time, self._rotation = self._rotation == "by time", None
            with self.folders.mirrored():
                trainer_utils.rotate_checkpoints(
                    output_dir=_output_dir(self.trainer),
                    save_total_limit=self.trainer.args.save_total_limit,
                    best_model_checkpoint=self.trainer.state.best_model_checkpoint,
                    use_mtime=is_by_time,
                )

    def close(self, *, is_failing: bool) -> None:
        """Wait until everything is durable, and close the store. If training has failed, log errors only."""
        try:
            try:
                if self.is_writer:
                    self.settle(waits=True)
            finally:
                self.pointers.close()
        except CkstoreError as error:
            if not is_failing:
                raise
            _log.error("a checkpoint could not be stored: %s", error)

    # Resume

    def folder_to_resume(self, wanted: Any) -> str | None:
        """Return the folder that training resumes from. Rank 0 decides, and lays it again if it is missing.

        Raises:
            UsageError: Another output directory saves into the run.
        """
        if not wanted and not self._saves:
            return None
        answer: list[Any] = [None]
        if self.is_writer:
            try:
                answer[0] = self._folder_to_resume(wanted)
            except Exception as error:
                answer[0] = error
        if rank_and_size()[1] > 1:
            torch.distributed.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return None if answer[0] is None else str(answer[0])

    @property
    def _saves(self) -> bool:
        return self.trainer.args.save_strategy != "no" and self.trainer.hp_search_backend is None

    def _folder_to_resume(self, wanted: Any) -> Path | None:
        if not wanted:
            self.folders.claim()
            return None
        folder = self.folders.to_resume(wanted)
        if wanted is True and folder == self.folders.all()[-1] and self.trainer.args.save_strategy != "no":
            # A crash came before the rotation. The newest folder may look older, so the steps decide.
            self._rotation = "by step"
        return folder

    def find_best(self) -> None:
        """Set the best checkpoint where its path is of another machine."""
        state = self.trainer.state
        if state.best_model_checkpoint is None and state.best_global_step:
            folder = self.folders.of_step(state.best_global_step)
            if is_pointer(folder):
                state.best_model_checkpoint = str(folder)

    def part(self, folder: str, name: str, *, otherwise: str = "", **how: Any) -> Any:
        """Restore one part of a checkpoint; None: it has none, and a warning says what happens ``otherwise``."""
        try:
            return self.pointers.load(folder, only=f"{name}.*", **how)[name]
        except NotFoundError:
            # Raises if there is no checkpoint at all.
            self.pointers.load(folder, only=f"{FILES}.*")
            if otherwise:
                _log.warning("%s has no %s state (save_only_model, for example): %s", folder, name, otherwise)
            return None

    def load_model(self, folder: str) -> None:
        """Restore the model strictly.

        Raises:
            UsageError: The model is not the one that was saved. Nothing was written.
        """
        model = unwrapped(self.trainer)
        if not has_adapters(model):
            if self.part(folder, "adapters") is not None:
                raise UsageError("the checkpoint has adapters, and the model has none", where=folder)
            self.part(folder, "model", into={"model": model})
            return
        saved = {name: self.part(folder, name) for name in ("adapters", "model")}
        put_adapters(model, {name: part for name, part in saved.items() if part is not None}, where=folder)

    def prewarm(self) -> None:
        """Start the saver and allocate shared memory for a state, so that a lack of memory shows now."""
        trainer = self.trainer
        optimizer = _optimizer_of(trainer)
        if not (self._saves and self.pointers.background and self.is_writer):
            return
        if isinstance(optimizer, torch.optim.Optimizer):
            self.pointers.store.attach(optimizer)
        state = model_parts(unwrapped(trainer))
        if not trainer.args.save_only_model:
            state["optimizer"] = optimizer.state_dict()
            state["moments"] = _moments_to_come(optimizer)
        try:
            self.pointers.prewarm(state)
        except CapacityError as error:
            raise CapacityError(
                f"a save in the background needs a second copy of the state: {error.what}",
                todo="give this process more memory, or use attach(trainer, background=False), which needs no copy",
            ) from error


def unwrapped(trainer: Any) -> Any:
    """Return the model without what accelerate, DDP and torch.compile wrapped it in."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def _optimizer_of(trainer: Any) -> Any:
    optimizer = trainer.optimizer
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _moments_to_come(optimizer: Any) -> list[torch.Tensor]:
    """Return memory as large as what Adam of torch will need for parameters without a state. It is not touched."""
    if not type(optimizer).__module__.startswith("torch.optim."):
        return []
    return [
        torch.empty_like(parameter, device="cpu")
        for group in optimizer.param_groups
        if "betas" in group
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
        for _ in group["betas"]
    ]


class _Between(transformers.TrainerCallback):  # type: ignore[misc]
    """Prepares the store when training begins, and settles what has become durable after every step."""

    def __init__(self, door: _Door) -> None:
        self._door = door

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Attach the optimizer, which exists only now, and allocate memory."""
        self._door.find_best()
        self._door.prewarm()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Settle what has become durable."""
        if self._door.is_writer:
            self._door.settle()


class _StoreTrainer:
    """Methods of a ``Trainer`` that save and load checkpoints; ``attach`` puts them before those of its class."""

    _ckstore: _Door
    args: Any
    state: Any

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        default: Any = super()
        door = self._ckstore
        try:
            folder = door.folder_to_resume(resume_from_checkpoint)
            output = default.train(folder, *args, **kwargs)
        except BaseException:
            door.close(is_failing=True)
            raise
        door.close(is_failing=False)
        return output

    # Save

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        default: Any = super()
        if trial is not None or self._ckstore.trainer.hp_search_backend is not None:
            # The folders of trials are not those of one run.
            default._save_checkpoint(model, trial)
            return
        with self._ckstore.saving():
            default._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        default: Any = super()
        door = self._ckstore
        if door.draft is None or output_dir is None or Path(output_dir) != door.folder:
            default._save(output_dir, state_dict)
        elif door.is_writer:
            with door.rotation_limit(door.limit):
                if door.writes_weights:
                    default._save(output_dir, state_dict)
                else:
                    _save_small_files(self, output_dir)
            door.draft.update(model_parts(unwrapped(self)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        default: Any = super()
        door = self._ckstore
        if door.draft is None:
            default._save_optimizer_and_scheduler(output_dir)
        elif door.is_writer:
            door.draft["optimizer"] = _optimizer_of(self).state_dict()
            door.draft["scheduler"] = door.trainer.lr_scheduler.state_dict()

    def _save_scaler(self, output_dir: str) -> None:
        default: Any = super()
        door = self._ckstore
        if door.draft is None:
            default._save_scaler(output_dir)
        elif door.is_writer and (scaler := _scaler_of(self)) is not None:
            door.draft["scaler"] = scaler.state_dict()

    def _save_rng_state(self, output_dir: str) -> None:
        default: Any = super()
        door = self._ckstore
        if door.draft is None:
            default._save_rng_state(output_dir)
        else:
            door.draft["random"] = gather_rng()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        default: Any = super()
        door = self._ckstore
        if door.is_writer:
            door.settle(waits=True)
        # The best model may be loaded by every rank now.
        door.trainer.accelerator.wait_for_everyone()
        with door.folders.mirrored() if door.is_writer else contextlib.nullcontext():
            return default._finalize_training(trial, num_train_samples, start_time)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        default: Any = super()
        door = self._ckstore
        is_busy = not self.args.hub_always_push and not _is_push_done(self)
        if door.draft is None or not door.is_writer or is_busy or self.args.hub_strategy == "end":
            default._push_from_checkpoint(checkpoint_folder)
            return
        exported = door.exports / Path(checkpoint_folder).name
        if _is_push_done(self):
            shutil.rmtree(door.exports, ignore_errors=True)
        # Real files, as transformers without ckstore would have them in the folder.
        shutil.copytree(checkpoint_folder, exported, ignore=shutil.ignore_patterns(POINTER_NAME))
        with door.rotation_limit(door.limit), door.uploads():
            default._save(str(exported))
            if not self.args.save_only_model:
                default._save_optimizer_and_scheduler(str(exported))
                default._save_scaler(str(exported))
                default._save_rng_state(str(exported))
            default._push_from_checkpoint(str(exported))

    def _finish_current_push(self) -> None:
        default: Any = super()
        default._finish_current_push()
        if self._ckstore.is_writer:
            shutil.rmtree(self._ckstore.exports, ignore_errors=True)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        default: Any = super()
        with self._ckstore.uploads():
            return default.push_to_hub(*args, **kwargs)

    # Load

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        default: Any = super()
        if is_pointer(resume_from_checkpoint):
            self._ckstore.load_model(resume_from_checkpoint)
        else:
            default._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        default: Any = super()
        best = self.state.best_model_checkpoint
        if not is_pointer(best):
            default._load_best_model()
            return
        _log.info("the best model is loaded from %s", best)
        self._ckstore.load_model(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        default: Any = super()
        door = self._ckstore
        if checkpoint is None or not is_pointer(checkpoint):
            default._load_optimizer_and_scheduler(checkpoint)
            return
        for name, target in (("optimizer", _optimizer_of(self)), ("scheduler", door.trainer.lr_scheduler)):
            door.part(checkpoint, name, otherwise=f"the {name} starts empty", into={name: target})

    def _load_scaler(self, checkpoint: str | None) -> None:
        default: Any = super()
        if checkpoint is None or not is_pointer(checkpoint):
            default._load_scaler(checkpoint)
        elif (scaler := _scaler_of(self)) is not None:
            self._ckstore.part(checkpoint, "scaler", otherwise="the scaler starts empty", into={"scaler": scaler})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        default: Any = super()
        if checkpoint is None or not is_pointer(checkpoint):
            default._load_rng_state(checkpoint)
        elif states := self._ckstore.part(checkpoint, "random", otherwise="random numbers differ from the first run"):
            put_own_rng(states)


def _is_push_done(trainer: Any) -> bool:
    push = getattr(trainer, "push_in_progress", None)
    return push is None or bool(push.is_done())


def _scaler_of(trainer: Any) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


def _save_small_files(trainer: Any, folder: str) -> None:
    """Write what ``Trainer._save`` writes, without weights."""
    model = unwrapped(trainer)
    if has_adapters(model):
        for name, config in model.peft_config.items():
            saved = copy.copy(config)
            saved.inference_mode = True
            saved.save_pretrained(folder if name == "default" else str(Path(folder, name)))
    elif isinstance(model, transformers.PreTrainedModel):
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    torch.save(trainer.args, Path(folder, "training_args.bin"))
