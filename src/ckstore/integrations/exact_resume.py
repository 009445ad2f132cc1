"""``ExactResume``: a callback of Lightning that makes a resumed run continue exactly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckstore.integrations.lightning import CheckpointIO
from ckstore.integrations.lightning_copies import PYTORCH, check, loaded, part
from ckstore.integrations.random_states import gather_rng, put_own_rng

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _LightningCallback
    from pytorch_lightning.callbacks import Callback as _PytorchCallback

    class _Callback(_LightningCallback, _PytorchCallback): ...  # type: ignore[misc]

else:
    _Callback = object

_log = logging.getLogger("ckstore")


class ExactResume(_Callback):
    """A callback that makes a resumed run continue exactly: it saves the random states of all ranks.

    Lightning saves none, so that dropout and shuffling differ after a resume. A run resumed at the end of an epoch is
    exact; one resumed within an epoch is exact if its loader is stateful, as torchdata's ``StatefulDataLoader``. With
    another loader Lightning warns.

    With a ``CheckpointIO`` of ckstore it also attaches the optimizers, so that a save waits for little; and it notices
    after each batch when a checkpoint has become durable, or has failed.

    Args:
        guard: Attach the optimizers. From the save until its next step, only an optimizer may then change its
            parameters; see ``Store.attach``. Not done if a callback averages or swaps weights.
    """

    def __new__(cls, *args: Any, **options: Any) -> ExactResume:
        """Return an object that is also a callback of every copy of Lightning that is loaded."""
        libraries = loaded(PYTORCH)
        for library in libraries:
            check(library)
        bases = tuple(part(library, "callbacks").Callback for library in libraries)
        made: ExactResume = object.__new__(_with_bases(cls, bases))
        return made

    def __init__(self, *, guard: bool = True) -> None:
        self._guard = guard
        self._random: Sequence[Mapping[str, Any]] | None = None
        self._is_within_epoch = False
        self._loader_states: list[dict[str, Any]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return _make_exact_resume, (self._guard,)

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint."""
        return "ckstore.ExactResume"

    def state_dict(self) -> dict[str, Any]:
        """Return the random states of all ranks. Lightning calls it on every rank."""
        return {"random": gather_rng()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the random states until training starts."""
        self._random = state_dict["random"]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read where in its epoch the run was saved."""
        fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
        progress = fit_loop.get("epoch_loop.batch_progress", {})
        has_begun = progress.get("current", {}).get("ready", 0) > 0
        self._is_within_epoch = has_begun and not progress.get("is_last_batch", False)
        self._loader_states = fit_loop.get("state_dict", {}).get("combined_loader", []) if has_begun else []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the random states back before Lightning makes an iterator over the data."""
        if self._random is not None:
            put_own_rng(self._random)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the optimizers, and undo what making an iterator has changed."""
        plugin = plugin_of(trainer)
        if self._guard and plugin is not None and not _swaps_weights(trainer):
            for optimizer in trainer.optimizers:
                plugin.attach(optimizer)
        if self._random is None:
            return
        if self._is_within_epoch:
            put_own_rng(self._random)
        elif self._loader_states:
            self._begin_epoch(trainer, self._random)
        self._random = None
        self._loader_states = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Notice commits that have ended.

        Raises:
            CkstoreError: A commit failed.
        """
        plugin = plugin_of(trainer)
        if plugin is not None:
            plugin.poll()

    def _begin_epoch(self, trainer: Any, states: Sequence[Mapping[str, Any]]) -> None:
        """Begin a new pass over stateful loaders that were saved at the end of an epoch.

        Lightning either continues the old pass, which is at its end, and so skips an epoch; or it does not load the
        states of the loaders, so that they shuffle differently.
        """
        loader = getattr(trainer.fit_loop, "_combined_loader", None)
        fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
        if loader is None or fetcher is None:
            _log.warning(
                "the checkpoint was saved at the end of an epoch, and its data loader has a state: this version of "
                "Lightning may skip an epoch, or shuffle differently than without the resume"
            )
            return
        loader._load_state_dicts(self._loader_states)
        # Move the samplers to the end of the old pass.
        iter(loader)
        put_own_rng(states)
        iter(fetcher)


def _make_exact_resume(guard: bool) -> ExactResume:
    return ExactResume(guard=guard)


def _with_bases(cls: type, bases: tuple[type, ...]) -> type:
    missing = tuple(base for base in bases if not issubclass(cls, base))
    if not missing:
        return cls
    return type(cls.__name__, (cls, *missing), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def plugin_of(trainer: Any) -> CheckpointIO | None:
    """Return the ``CheckpointIO`` of a trainer, also from inside wrappers; None: Lightning's own."""
    plugin = getattr(trainer.strategy, "_checkpoint_io", None)
    while plugin is not None and not isinstance(plugin, CheckpointIO):
        plugin = getattr(plugin, "checkpoint_io", None)
    return plugin


def _swaps_weights(trainer: Any) -> bool:
    """Say whether a callback changes parameters outside the step of an optimizer."""
    names = {"StochasticWeightAveraging", "WeightAveraging"}
    return any(base.__name__ in names for callback in trainer.callbacks for base in type(callback).__mro__)
