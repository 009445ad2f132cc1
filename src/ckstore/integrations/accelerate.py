"""The door into accelerate: ``Accelerator.save_state`` saves into a store, ``load_state`` resumes from it.

``attach`` gives the accelerator a class with four methods replaced. Around accelerate's own ``save_state`` and
``load_state`` they replace the functions that write and read files; hooks, naming and counting stay accelerate's. What
FSDP, DeepSpeed, Megatron-LM and XLA save is left to accelerate.

A checkpoint of the store holds ``model``, ``optimizer``, ``scheduler`` (a second one is ``model_1``), ``scaler``,
``custom`` (registered objects), ``ranks`` (for each rank its random states, dataloaders and step), and ``iteration``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from accelerate import accelerator as accelerator_module
from accelerate.utils import DistributedType, broadcast_object_list

from ckstore.errors import CkstoreError, NotFoundError, UsageError
from ckstore.format.records import PointerRecord
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import POINTER_NAME, is_pointer, read_pointer, refuse_damaged
from ckstore.integrations.random_states import capture_rng, put_rng, rank_and_size
from ckstore.integrations.signatures import check_signatures

if TYPE_CHECKING:
    from ckstore.config import Policy

_log = logging.getLogger("ckstore")

TESTED = ("1.15.0",)
_METHODS = {
    "save_state": ("self", "output_dir", "safe_serialization", "save_model_func_kwargs"),
    "load_state": ("self", "input_dir", "load_kwargs", "load_model_func_kwargs"),
    "backward": ("self", "loss", "kwargs"),
    "end_training": ("self",),
}
_FUNCTIONS = {
    "save_accelerator_state": (
        "output_dir",
        "model_states",
        "optimizers",
        "schedulers",
        "dataloaders",
        "process_index",
        "step",
        "scaler",
        "save_on_each_node",
        "safe_serialization",
    ),
    "load_accelerator_state": (
        "input_dir",
        "models",
        "optimizers",
        "schedulers",
        "dataloaders",
        "process_index",
        "scaler",
        "map_location",
        "load_kwargs",
        "load_model_func_kwargs",
    ),
    "save_custom_state": ("obj", "path", "index", "save_on_each_node"),
    "load_custom_state": ("obj", "path", "index"),
}
_PASSED_THROUGH = (
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
)
_NUMBERED = re.compile(r"checkpoint_[0-9]+")
_LAST_FILE = "random_states_0.pkl"
"""What accelerate itself writes last: a folder that has it is complete."""


def attach(
    accelerator: accelerate.Accelerator,
    store: str | os.PathLike[str] | None = None,
    *,
    run: str = "main",
    policy: Policy | None = None,
    background: bool = True,
) -> None:
    """Let an accelerator save into a store. Call it once, before the first ``save_state`` or ``load_state``.

    ``save_state`` then commits the state, by default in the background, and writes a folder with a pointer.
    ``total_limit`` is applied when the new checkpoint is durable. ``load_state`` restores strictly: keys, shapes,
    dtypes and random states must fit. It also restores the count of saves and the order of data. Folders that
    accelerate itself has written can still be loaded.

    Args:
        accelerator: The accelerator.
        store: Folder or URL of the store; created on first save. None: ``ckstore`` in the project's folder.
        run: The run of the store.
        policy: How checkpoints are stored; None: exactly.
        background: Commit in the background: ``save_state`` waits only for a copy of the state, and for less of it
            where the optimizer's own tensors can be copied later.

    Raises:
        UsageError: There is neither ``store`` nor a project folder, or the accelerator is attached to another store.
        UnsupportedError: This version of accelerate has other methods than those tested.
    """
    check_signatures(
        accelerate.Accelerator, _METHODS, library="accelerate", version=accelerate.__version__, tested=TESTED
    )
    check_signatures(
        accelerator_module, _FUNCTIONS, library="accelerate", version=accelerate.__version__, tested=TESTED
    )
    if store is None:
        if accelerator.project_dir is None:
            raise UsageError(
                "there is no place for the store: the accelerator has no project_dir",
                todo="give attach(accelerator, store=...), or Accelerator(project_dir=...)",
            )
        store = Path(accelerator.project_dir) / "ckstore"
    made_by = f"accelerate {accelerate.__version__}"
    pointers = PointerStore.at(store, run=run, policy=policy, background=background, made_by=made_by)
    attached = getattr(accelerator, "_ckstore", None)
    if attached is not None:
        if (attached.pointers.address, attached.pointers.run) != (pointers.address, run):
            raise UsageError("the accelerator is attached to another store", where=attached.pointers.address)
        return
    if accelerator.distributed_type in _PASSED_THROUGH:
        _log.warning("%s saves its own files: accelerate writes them, not ckstore", accelerator.distributed_type.value)
        return
    accelerator._ckstore = _Door(accelerator, pointers)
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (_AttachedAccelerator, kind), {"__module__": kind.__module__})


class _AttachedAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The methods of an attached accelerator; its own class comes next in the order of methods."""

    _ckstore: _Door

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **how: Any) -> Any:
        with self._ckstore.saving() as door:
            place = super().save_state(output_dir, safe_serialization, **how)
            door.commit(Path(place))
        return place

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **how: Any) -> None:
        with self._ckstore.loading() as door:
            chosen = door.folder_to_load(input_dir)
            super().load_state(chosen, load_kwargs, **how)
            door.restore_iteration()

    def backward(self, loss: torch.Tensor, **how: Any) -> None:
        self._ckstore.poll()
        super().backward(loss, **how)

    def end_training(self) -> None:
        self._ckstore.finish()
        super().end_training()


class _Door:
    """What an attached accelerator saves and loads."""

    def __init__(self, accelerator: accelerate.Accelerator, pointers: PointerStore) -> None:
        self.pointers = pointers
        # The accelerator owns this object, which may outlive it until the process ends.
        self._owner = weakref.ref(accelerator)
        self._project = accelerator.project_configuration
        self._is_main = accelerator.is_main_process
        self._state: dict[str, Any] = {}
        self._iteration: int | None = None
        self._has_saved = False
        """Whether a checkpoint was saved since older ones were last deleted."""
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        atexit.register(_finish_at_exit, self, os.getpid())

    @property
    def _accelerator(self) -> accelerate.Accelerator:
        accelerator = self._owner()
        assert accelerator is not None, "the accelerator calls this"
        return accelerator

    # Save

    @contextlib.contextmanager
    def saving(self) -> Iterator[_Door]:
        """Replace what writes files, and the deletion of older folders, which comes when this save is durable."""
        project = self._project
        limit, project.total_limit = project.total_limit, None
        self.poll()
        try:
            with _replaced(save_accelerator_state=self._collect, save_custom_state=self._collect_custom):
                yield self
        finally:
            project.total_limit, self._state = limit, {}
        self.poll()

    def _collect(
        self,
        output_dir: str,
        model_states: Sequence[Mapping[str, Any]],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        dataloaders: Sequence[Any],
        process_index: int,
        step: int,
        scaler: Any = None,
        save_on_each_node: bool = False,
        safe_serialization: bool = True,
    ) -> Path:
        """Take the place of accelerate's function that writes all files: note what is to be committed."""
        parts: dict[str, Any] = {}
        for number, model in enumerate(model_states):
            parts[_named("model", number)] = _bare_state(self._accelerator._models[number], model)
        for number, optimizer in enumerate(optimizers):
            parts[_named("optimizer", number)] = optimizer.state_dict()
            if self.pointers.background and self._accelerator.is_main_process:
                self._guard(getattr(optimizer, "optimizer", optimizer))
        for number, scheduler in enumerate(schedulers):
            parts[_named("scheduler", number)] = scheduler.state_dict()
        if scaler is not None:
            parts["scaler"] = scaler.state_dict()
        parts["ranks"] = _gathered(
            {"random": capture_rng(), "step": step, "dataloaders": [_loader_state(each) for each in dataloaders]}
        )
        parts["iteration"] = self._accelerator.save_iteration
        groups = {"model": model_states, "optimizer": optimizers, "scheduler": schedulers, "dataloader": dataloaders}
        parts["counts"] = {kind: len(group) for kind, group in groups.items()}
        parts["custom"] = []
        self._state = parts
        return Path(output_dir)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._guarded:
            self.pointers.store.attach(optimizer)
            self._guarded.add(optimizer)

    def _collect_custom(self, obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
        self._state["custom"].append(obj.state_dict())
        # `load_state` counts these files.
        marker = Path(path) / f"custom_checkpoint_{index}.pkl"
        marker.write_text(f"This object is in the checkpoint that {POINTER_NAME} names.\n")

    def commit(self, folder: Path) -> None:
        """Commit what was collected, and write the folder's pointer. Only the main process does."""
        failed: list[str | None] = [None]
        try:
            if self._is_main:
                step = self._state["iteration"]
                if not self._project.automatic_checkpoint_naming and (last := self.pointers.last_step) is not None:
                    step = last + 1
                self.pointers.save(self._state, step, folder / POINTER_NAME)
                self._has_saved = True
        except CkstoreError as error:
            failed = [str(error)]
            raise
        finally:
            # The other processes must not wait for a main process that has failed.
            broadcast_object_list(failed)
        if failed[0] is not None:
            raise CkstoreError(f"the main process could not save: {failed[0]}", where=folder)

    def poll(self) -> None:
        """Settle what became durable, and delete older folders then."""
        if not self._is_main:
            return
        self.pointers.poll()
        if self._has_saved and self.pointers.is_settled:
            self._has_saved = False
            self._rotate()

    def finish(self) -> None:
        """Wait until everything is durable, and close the store."""
        try:
            if self._is_main:
                self.pointers.wait()
                self.poll()
        finally:
            self.pointers.close()

    def _rotate(self) -> None:
        """Delete the oldest folders beyond ``total_limit`` with their checkpoints, as accelerate does before a save."""
        project = self._project
        if not project.automatic_checkpoint_naming or project.total_limit is None:
            return
        # A folder whose save has failed takes nobody's place.
        folders = [folder for folder in _numbered(self._checkpoints()) if self._lack_of(folder) is None]
        for folder in folders[: max(0, len(folders) - project.total_limit)]:
            records: list[tuple[Path, PointerRecord]] = []
            with contextlib.suppress(CkstoreError):
                records.append((folder, read_pointer(folder)))
            self.pointers.delete_entries(records)
            shutil.rmtree(folder)

    def _checkpoints(self) -> Path:
        return Path(self._project.project_dir) / "checkpoints"

    def _lack_of(self, folder: Path) -> CkstoreError | None:
        """Return why a folder has no checkpoint: none that its pointer names, and none that accelerate has written."""
        try:
            self.pointers.entry(folder)
        except CkstoreError as error:
            return None if not is_pointer(folder) and (folder / _LAST_FILE).is_file() else error
        return None

    # Load

    @contextlib.contextmanager
    def loading(self) -> Iterator[_Door]:
        """Replace what reads files."""
        self.pointers.wait()
        self._accelerator.wait_for_everyone()
        self._iteration = None
        with _replaced(load_accelerator_state=self._restore, load_custom_state=self._restore_custom):
            yield self
        self._state = {}

    def folder_to_load(self, given: str | None) -> str | None:
        """Return the folder to load: the given one, or the newest whose checkpoint is durable.

        Raises:
            NotFoundError: The given folder has a pointer whose checkpoint is gone, or no folder can be loaded.
        """
        accelerator = self._accelerator
        if given is not None or not accelerator.project_configuration.automatic_checkpoint_naming:
            return given
        found: list[Any] = [self._newest_folder() if accelerator.is_main_process else None]
        broadcast_object_list(found)
        if found[0] is None:
            raise NotFoundError(
                "no folder has a checkpoint that can be loaded",
                where=self._checkpoints(),
                todo="start without load_state, or give load_state(folder)",
            )
        return str(found[0])

    def _newest_folder(self) -> str | None:
        """Return the newest complete folder. Newer ones, whose save a crash has interrupted, are deleted."""
        for folder in reversed(_numbered(self._checkpoints())):
            lack = self._lack_of(folder)
            if lack is None:
                return str(folder)
            if self._is_unfinished(folder):
                _log.warning("%s is deleted: its save did not complete", folder)
                shutil.rmtree(folder)
            else:
                _log.warning("%s is passed over: %s", folder, lack)
        return None

    def _is_unfinished(self, folder: Path) -> bool:
        """Say whether a folder without a checkpoint is what a crash in a save to this run has left."""
        if not any(folder.iterdir()):
            return True
        try:
            record = read_pointer(folder)
        except CkstoreError:
            return False
        return record.seq is None and self.pointers.owns(record, folder)

    def _restore(
        self,
        input_dir: str,
        models: Sequence[Any],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        dataloaders: Sequence[Any],
        process_index: int,
        scaler: Any = None,
        map_location: Any = None,
        load_kwargs: Any = None,
        **load_model_func_kwargs: Any,
    ) -> dict[str, Any]:
        """Take the place of accelerate's function that reads all files."""
        if not is_pointer(input_dir):
            refuse_damaged(input_dir)
            own = (input_dir, models, optimizers, schedulers, dataloaders, process_index, scaler, map_location)
            return dict(_OWN["load_accelerator_state"](*own, load_kwargs, **load_model_func_kwargs))
        self._state = rest = self.pointers.load(input_dir, only=["ranks*", "iteration", "custom*", "counts*"])
        groups = {"model": models, "optimizer": optimizers, "scheduler": schedulers, "dataloader": dataloaders}
        for kind, group in groups.items():
            if len(group) != rest["counts"][kind]:
                raise UsageError(
                    f"the checkpoint has {rest['counts'][kind]} {kind}s, and the accelerator has {len(group)}",
                    where=input_dir,
                    todo="prepare the objects that were prepared when it was saved",
                )
        into: dict[str, Any] = {}
        for kind, objects in (("optimizer", optimizers), ("scheduler", schedulers)):
            into.update({_named(kind, number): each for number, each in enumerate(objects)})
        if scaler is not None:
            into["scaler"] = scaler
        for number, model in enumerate(models):
            name, bare = _named("model", number), _unwrapped(model)
            if load_model_func_kwargs:
                state = self.pointers.load(input_dir, only=f"{name}.*")[name]
                bare.load_state_dict(state, **load_model_func_kwargs)
            else:
                into[name] = bare
        if into:
            self.pointers.load(input_dir, into=into, only=[f"{name}.*" for name in into])
        self._iteration = rest["iteration"]
        return {"step": _put_rank(rest["ranks"], dataloaders)}

    def _restore_custom(self, obj: Any, path: str, index: int = 0) -> None:
        if is_pointer(path):
            obj.load_state_dict(self._state["custom"][index])
        else:
            _OWN["load_custom_state"](obj, path, index)

    def restore_iteration(self) -> None:
        """Let the next save continue the numbers of the folders."""
        if self._iteration is None:
            return
        numbers = [_number(folder) for folder in _numbered(self._checkpoints())] if self._project.project_dir else []
        self._project.iteration = max(self._iteration, *numbers, -1) + 1


def _finish_at_exit(door: _Door, process: int) -> None:
    """At the end of the process, unless it is a fork: wait for the last commit."""
    if os.getpid() != process:
        return
    try:
        door.finish()
    except CkstoreError as error:
        _log.error("the last checkpoint was not saved: %s", error)


_OWN: dict[str, Callable[..., Any]] = {name: getattr(accelerator_module, name) for name in _FUNCTIONS}
"""accelerate's functions that write and read files."""


@contextlib.contextmanager
def _replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions that accelerate's methods call."""
    before = {name: getattr(accelerator_module, name) for name in functions}
    for name, function in functions.items():
        setattr(accelerator_module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(accelerator_module, name, function)


def _named(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _numbered(folder: Path) -> list[Path]:
    """Return the folders ``checkpoint_<n>`` by their number."""
    return sorted((each for each in folder.glob("checkpoint_*") if _NUMBERED.fullmatch(each.name)), key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _bare_state(model: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's state without the prefix of DistributedDataParallel, so that one process can load it too."""
    if _unwrapped(model) is model:
        return state
    return {name.removeprefix("module."): value for name, value in state.items()}


def _unwrapped(model: Any) -> Any:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _gathered(own: dict[str, Any]) -> list[Any]:
    """Return what each rank gives, by rank."""
    _, size = rank_and_size()
    if size == 1:
        return [own]
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def _sampler(dataloader: Any) -> Any:
    """Return the seedable sampler of a dataloader, or None."""
    get_sampler = getattr(dataloader, "get_sampler", None)
    sampler = None if get_sampler is None else get_sampler()
    return sampler if hasattr(sampler, "initial_seed") else None


def _loader_state(dataloader: Any) -> dict[str, Any]:
    """Return what decides the order of a dataloader's next epoch, and its place if it knows it."""
    generator = getattr(dataloader, "synchronized_generator", None)
    state: dict[str, Any] = {
        "iteration": getattr(dataloader, "iteration", None),
        "generator": None if generator is None else generator.get_state(),
        "sampler": None,
        "own": None,
    }
    sampler = _sampler(dataloader)
    if sampler is not None:
        state["sampler"] = {"initial_seed": sampler.initial_seed, "epoch": sampler.epoch}
    if getattr(dataloader, "use_stateful_dataloader", False):
        state["own"] = dataloader.state_dict()
    return state


def _put_rank(ranks: Sequence[Mapping[str, Any]], dataloaders: Sequence[Any]) -> int:
    """Restore random states and dataloaders of this rank; return its count of steps."""
    rank, size = rank_and_size()
    if size != len(ranks):
        _log.warning("the checkpoint is of %d processes, and this run has %d: results will differ", len(ranks), size)
    own = ranks[min(rank, len(ranks) - 1)]
    for dataloader, state in zip(dataloaders, own["dataloaders"], strict=False):
        if state["iteration"] is not None and hasattr(dataloader, "iteration"):
            dataloader.iteration = state["iteration"]
        generator = getattr(dataloader, "synchronized_generator", None)
        if generator is not None and state["generator"] is not None:
            generator.set_state(state["generator"])
        sampler = _sampler(dataloader)
        if sampler is not None and state["sampler"] is not None:
            sampler.initial_seed, sampler.epoch = state["sampler"]["initial_seed"], state["sampler"]["epoch"]
        if state["own"] is not None and getattr(dataloader, "use_stateful_dataloader", False):
            dataloader.load_state_dict(state["own"])
    if rank < len(ranks):
        put_rng(own["random"])
    return int(own["step"])
