"""The door into Lightning and Fabric: a ``CheckpointIO``, and ``load``. ``exact_resume.py`` has the callback.

The state of a checkpoint is Lightning's own: ``state_dict``, ``optimizer_states``, ``callbacks``, ``loops``. So
``ckstore restore POINTER -o FILE.ckpt`` writes the file that Lightning would have written.

Strategies that write shards (FSDP with sharded state, ModelParallel) and DeepSpeed do not use a ``CheckpointIO``: what
they save stays Lightning's.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckstore.errors import CkstoreError, LeafTypeError, NotFoundError, UsageError
from ckstore.integrations.leaves import OnUnstorable, check_mode, rebuilt, storable, with_hint
from ckstore.integrations.lightning_copies import FABRIC, PYTORCH, TESTED, check, loaded, part, torch_io
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import address_in, entry_of, is_pointer, read_pointer, refuse_damaged
from ckstore.integrations.signatures import check_signatures
from ckstore.opening import open as open_store

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as _LightningPlugin
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as _FabricPlugin

    from ckstore.api import Store
    from ckstore.config import Policy

    class _Plugin(_LightningPlugin, _FabricPlugin): ...  # type: ignore[misc]

else:
    _Plugin = object

_log = logging.getLogger("ckstore")

_LOADER = {"_load": ("path_or_url", "map_location", "weights_only")}

_OPTIONS = {"metrics", "tags", "policy"}
_CONFIGS = "ckstore_configs"
"""Key of a stored checkpoint: where configurations of OmegaConf were."""

_HINT = "`ckstore restore THIS_FILE -o NEW.ckpt` writes a file for torch.load. In Python: ckstore.lightning.load(path)."

_LAST = re.compile(r"last(-v\d+)?")
"""Names, without ending, that Lightning gives to the newest checkpoint."""

_TRANSFER = ".temp.ckpt"
"""Lightning's launchers send the weights of a child process to its parent in a file of this name."""


class CheckpointIO(_Plugin):
    """A plugin of Trainer and Fabric that saves checkpoints into a store.

    For example::

        trainer = Trainer(plugins=[CheckpointIO("store")], callbacks=[ExactResume(), ModelCheckpoint(save_last=True)])
        trainer.fit(model, ckpt_path="last")

    At the path that Lightning gives is a small file that names the checkpoint. Lightning decides what is kept; it is
    deleted, with its file, once everything that was saved later is durable. Until then both stay. After ``teardown``,
    which Trainer calls, everything is durable, the store is closed, and nothing waits to be deleted.

    ``storage_options`` of ``save_checkpoint`` may have ``metrics``, ``tags`` and ``policy``, as for ``Store.commit``.
    The score of a ``ModelCheckpoint`` with ``monitor`` is added to the metrics, for ``best:val_loss``.

    Args:
        store: Folder or URL of the store, outside the folder of the checkpoints; created on first save.
        run: The run of the store.
        policy: How checkpoints are stored; None: exactly.
        background: Commit in the background. A store in a bucket always commits in the foreground.
        on_unstorable: What to do with hyper-parameters and other leaves that cannot be stored: ``"raise"``, ``"drop"``
            (leave them out) or ``"text"`` (store their repr). Both are logged.

    Raises:
        UnsupportedError: Lightning is not installed, or this version has other methods than those known.
        UsageError: An argument is not valid.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        run: str = "main",
        policy: Policy | None = None,
        background: bool = True,
        on_unstorable: OnUnstorable = "raise",
    ) -> None:
        check_mode(on_unstorable)
        libraries = loaded(FABRIC)
        for library in libraries:
            check(library)
            # The class of the plugin is abstract: registering makes isinstance true in each copy of Lightning.
            part(library, "plugins.io.checkpoint_io").CheckpointIO.register(CheckpointIO)
        self._given: dict[str, Any] = {
            "store": os.fspath(store),
            "run": run,
            "policy": policy,
            "background": background,
            "on_unstorable": on_unstorable,
        }
        self._made_by = f"Lightning {libraries[0].__version__}"
        # AsyncCheckpointIO saves in a thread, and removes on the main thread.
        self._lock = threading.RLock()
        self._by_process: tuple[int, PointerStore] | None = None
        self._scored: tuple[int, dict[str, float]] | None = None
        self._logged: set[str] = set()

    def __repr__(self) -> str:
        return f"ckstore.lightning.CheckpointIO({self._given['store']!r}, run={self._given['run']!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that start processes pickle the trainer with its plugins.
        return self._given

    def __setstate__(self, given: dict[str, Any]) -> None:
        store, *_ = given.values()
        self.__init__(store, **{name: value for name, value in given.items() if name != "store"})  # type: ignore[misc]

    @property
    def store(self) -> Store:
        """The store. Created if it does not exist."""
        with self._lock:
            return self._pointers.store

    @property
    def _pointers(self) -> PointerStore:
        if self._by_process is None or self._by_process[0] != os.getpid():
            # A forked child must not use the handle of its parent.
            given = {name: self._given[name] for name in ("run", "policy", "background")}
            pointers = PointerStore(self._given["store"], made_by=self._made_by, hint=_HINT, **given)
            self._by_process = os.getpid(), pointers
            weakref.finalize(self, _close_at_end, pointers, os.getpid())
        return self._by_process[1]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Commit a checkpoint, and write its pointer to the path. To a URL, Lightning saves itself.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            UsageError: ``storage_options`` has unknown names.
            CkstoreError: As ``Store.commit`` and ``Store.commit_async``; or an earlier commit failed.
        """
        options = _checked_options(storage_options)
        file = _local_or_none(path)
        if file is None:
            self._log_once(
                "the path of a checkpoint is a URL, and pointers are local files: Lightning saves there itself, not "
                "into the store. Give ModelCheckpoint a local dirpath, and put the store in the bucket"
            )
        if file is None or file.name == _TRANSFER:
            torch_io().save_checkpoint(checkpoint, path)
            return
        with self._lock:
            file.parent.mkdir(parents=True, exist_ok=True)
            step = self._step_of(checkpoint)
            is_last = _is_last(file) or os.fspath(path) in _last_paths(checkpoint)
            metrics = {**self._scores(checkpoint, step, path), **(options.get("metrics") or {})}
            state = self._storable(checkpoint)
            try:
                self._pointers.save(
                    state,
                    step,
                    file,
                    metrics=metrics,
                    tags=options.get("tags") or (),
                    policy=options.get("policy"),
                    wait=_is_needed_to_resume(file, is_last=is_last),
                )
            except LeafTypeError as error:
                hint = 'CheckpointIO(..., on_unstorable="drop") leaves it out, and "text" stores its repr'
                raise with_hint(error, hint) from None

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore the checkpoint that a pointer names; a file of Lightning is loaded by Lightning.

        Args:
            path: The pointer; or, if there is no such file, a reference of the store: ``latest``, a tag, ``seq:12``,
                ``best:val_loss``.
            map_location: A device. Anything else: the CPU.
            weights_only: For files of Lightning. A store never contains pickled objects.

        Raises:
            FileNotFoundError: There is no such file, and no such checkpoint.
            NotFoundError: The checkpoint of the pointer is gone.
            CkstoreError: As ``Store.restore``.
        """
        with self._lock:
            file = _local_or_none(path)
            if file is None or (file.exists() and not is_pointer(file)):
                if file is not None:
                    refuse_damaged(file)
                how = {} if map_location is None else {"map_location": map_location}
                loaded: dict[str, Any] = torch_io().load_checkpoint(path, weights_only=weights_only, **how)
                return loaded
            device = _device_of(map_location)
            if file.exists():
                return _plain(self._restore_pointer(file, device))
            return _plain(self._restore_reference(os.fspath(path), device))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint and its pointer, once everything that was saved later is durable."""
        with self._lock:
            file = _local_or_none(path)
            if file is not None and (file.is_symlink() or is_pointer(file)):
                self._pointers.remove(file)
            elif file is None or file.exists():
                # A file of an earlier run without ckstore, which Lightning replaces by what is still in flight.
                self._pointers.wait()
                torch_io().remove_checkpoint(path)

    def attach(self, optimizer: Any) -> None:
        """Copy what an optimizer owns while training continues, as ``Store.attach`` describes.

        Raises:
            UsageError: It is not a torch optimizer, or it cannot report its steps.
        """
        with self._lock:
            if self._pointers.background:
                self._pointers.store.attach(optimizer)

    def poll(self) -> None:
        """Write the pointers of commits that have ended, and delete what was to be deleted. Does not wait.

        Raises:
            CkstoreError: A commit failed.
        """
        with self._lock:
            self._pointers.poll()

    def wait(self) -> None:
        """Wait until everything saved is durable, then do as ``poll``.

        Raises:
            CkstoreError: A commit failed.
        """
        with self._lock:
            self._pointers.wait()

    def teardown(self) -> None:
        """Wait until everything saved is durable, and close the store. It is opened again when needed.

        Raises:
            CkstoreError: A commit failed.
        """
        with self._lock:
            if self._by_process is not None:
                self._pointers.close()

    def _step_of(self, checkpoint: Mapping[str, Any]) -> int:
        for name in ("global_step", "step", "iteration"):
            step = checkpoint.get(name)
            if type(step) is int and step >= 0:
                return step
        newest = self._pointers.newest()
        return 0 if newest is None else newest.step + 1

    def _scores(self, checkpoint: Mapping[str, Any], step: int, path: str | os.PathLike[str]) -> dict[str, float]:
        """Return the scores by which ``ModelCheckpoint`` saves to this path, or has saved this step before."""
        callbacks = checkpoint.get("callbacks")
        scores: dict[str, float] = {}
        for state in callbacks.values() if isinstance(callbacks, dict) else ():
            if isinstance(state, dict) and isinstance(state.get("monitor"), str):
                # current_score belongs to the last checkpoint that was among the best.
                score = (state.get("best_k_models") or {}).get(os.fspath(path))
                if score is not None and ":" not in state["monitor"]:
                    scores[state["monitor"]] = float(score)
        if scores:
            self._scored = step, scores
        elif self._scored is not None and self._scored[0] == step:
            scores = self._scored[1]
        return scores

    def _storable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        found = storable(checkpoint, self._given["on_unstorable"])
        for note in found.notes:
            self._log_once(f"checkpoint: {note}")
        state: dict[str, Any] = found.state
        if not found.configs:
            return state
        state = {**state, _CONFIGS: found.configs}
        for key in ("hparams_type", "datamodule_hparams_type"):
            if isinstance(state.get(key), type):
                # The class of a configuration. It is made again from the path of its hyper-parameters.
                state[key] = state[key].__qualname__
        return state

    def _log_once(self, what: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            _log.warning("%s", what)

    def _restore_pointer(self, file: Path, device: Any) -> Any:
        try:
            return self._pointers.load(file, device=device)
        except NotFoundError as error:
            is_newest = file.is_symlink() or _is_last(file)
            instead = self._newest_in_folder_of(file) if is_newest and read_pointer(file).seq is None else None
            if instead is None:
                raise
            _log.warning("%s; %s is used instead", error.what, instead)
            return self._pointers.load(instead, device=device)

    def _newest_in_folder_of(self, file: Path) -> Path | None:
        """Return the pointer to the newest durable checkpoint in a folder."""
        found: list[tuple[int, Path]] = []
        store = self._pointers.store
        for each in sorted(file.parent.glob(f"*{file.suffix}")):
            if is_pointer(each) and (record := read_pointer(each)).run == store.run:
                try:
                    found.append((entry_of(store, record, where=each).seq, each))
                except CkstoreError:
                    continue
        return max(found, default=(0, None))[1]

    def _restore_reference(self, reference: str, device: Any) -> Any:
        missing = FileNotFoundError(f"Checkpoint file not found: {reference}")
        if not self._pointers.exists():
            raise missing
        try:
            return self._pointers.store.restore(reference, device=device)
        except (NotFoundError, UsageError) as error:
            raise missing from error


def _close_at_end(pointers: PointerStore, process: int) -> None:
    """Wait for commits when the plugin is garbage collected, or at exit: Fabric has no teardown."""
    if process != os.getpid():
        return
    try:
        pointers.close()
    except CkstoreError as error:
        _log.error("a checkpoint was not stored: %s", error)


def _checked_options(options: Any) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not set(options) <= _OPTIONS:
        raise UsageError(
            f"storage_options must be a dict with some of {', '.join(sorted(_OPTIONS))}",
            where=f"storage_options={options!r}"[:200],
        )
    return options


def _is_last(file: Path) -> bool:
    return _LAST.fullmatch(file.stem) is not None


def _last_paths(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return where each ``ModelCheckpoint`` saves its last checkpoint, whatever name it gives to it."""
    callbacks = checkpoint.get("callbacks")
    states = callbacks.values() if isinstance(callbacks, dict) else ()
    return [str(state["last_model_path"]) for state in states if isinstance(state, dict) and "last_model_path" in state]


def _is_needed_to_resume(file: Path, *, is_last: bool) -> bool:
    """Say whether a resume could need a checkpoint that is not durable yet, because there is no other."""
    if os.path.lexists(file):
        return False
    return is_last or not any(is_pointer(each) for each in file.parent.glob(f"*{file.suffix}"))


def _local_or_none(path: str | os.PathLike[str]) -> Path | None:
    """Return a path in the file system; None: a URL."""
    text = os.fspath(path).removeprefix("file://")
    return None if "://" in text else Path(text)


def _device_of(map_location: Any) -> Any:
    return map_location if isinstance(map_location, (str, torch.device)) else None


def _plain(state: Any) -> dict[str, Any]:
    """Return a restored checkpoint with configurations of OmegaConf where they were."""
    configs = state.pop(_CONFIGS, ()) if isinstance(state, dict) else ()
    made: dict[str, Any] = rebuilt(state, configs)
    for hparams, kind in (
        ("hyper_parameters", "hparams_type"),
        ("datamodule_hyper_parameters", "datamodule_hparams_type"),
    ):
        if [hparams] in list(configs) and kind in made:
            made[kind] = type(made[hparams])
    return made


def load(path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None) -> Any:
    """Return a checkpoint of Lightning or Fabric, from a pointer or from a file of Lightning.

    Args:
        path: The pointer or file.
        map_location: A device for a pointer, or None for the CPU; for a file as for ``torch.load``.
        weights_only: For a file, as for ``torch.load``.

    Raises:
        NotFoundError: There is no such file, or the checkpoint of the pointer is gone.
        CkstoreError: As ``Store.restore``.
    """
    file = _local_or_none(path)
    if file is not None and not file.exists():
        raise NotFoundError("there is no such checkpoint", where=path)
    if file is None or not is_pointer(file):
        if file is not None:
            refuse_damaged(file)
        how = {} if map_location is None else {"map_location": map_location}
        return torch_io().load_checkpoint(path, weights_only=weights_only, **how)
    record = read_pointer(file)
    with open_store(address_in(record, file), run=record.run, create=False) as store:
        info = entry_of(store, record, where=file)
        return _plain(store.restore(f"seq:{info.seq}", device=_device_of(map_location)))


def install_loader() -> None:
    """Make ``LightningModule.load_from_checkpoint`` accept pointers, in every copy of Lightning that is loaded.

    Lightning has no plugin there: this replaces the function that it calls. Calling it again does nothing.

    Raises:
        UnsupportedError: Lightning is not installed, or this version has another function.
    """
    for library in loaded(PYTORCH):
        saving = part(library, "core.saving")
        own = getattr(saving, "pl_load", None)
        if getattr(own, "is_of_ckstore", False):
            continue
        owner = type("saving", (), {"_load": staticmethod(own)}) if own is not None else object()
        check_signatures(owner, _LOADER, library=library.__name__, version=str(library.__version__), tested=TESTED)
        setattr(saving, "pl_load", _loader_before(own))  # noqa: B010 - a type checker does not know the name


def _loader_before(own: Any) -> Any:
    @functools.wraps(own)
    def load_pointer_or_file(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_path = isinstance(path_or_url, (str, os.PathLike))
        file = _local_or_none(path_or_url) if is_path else None
        if file is not None and is_pointer(file):
            return load(file, map_location)
        if file is not None:
            refuse_damaged(file)
        return own(path_or_url, map_location=map_location, weights_only=weights_only)

    load_pointer_or_file.is_of_ckstore = True  # type: ignore[attr-defined]
    return load_pointer_or_file
