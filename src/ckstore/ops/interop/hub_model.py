"""What transformers expects in the folder of a model: names, tied weights, and whether its file layout is different.

transformers is optional. It is imported only to export a checkpoint that has a ``config.json``. The model is built on
torch's meta device, without memory for weights. No code of the checkpoint is executed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore.errors import CkstoreError, UnsupportedError, UsageError

_log = logging.getLogger("ckstore")

_AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForImageTextToText",
)
_UNCHECKED = "so the names of the weights were not checked"
_NAMED_MAX = 4

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class HubModel:
    """The model class that a state belongs to.

    Attributes:
        class_name: Its name.
        tied: Name of a weight -> name of the weight that it is tied to.
        save: Writes a state in the layout of the hub, if that is not the layout of the state: state, folder, bytes per
            file. None: the layouts are the same.
    """

    class_name: str
    tied: Mapping[str, str]
    save: Callable[[dict[str, Any], Path, int], None] | None


def find_hub_model(config: bytes | None, shapes: Shapes) -> HubModel | str:
    """Return the model class of a state, or why it is unknown, as a sentence for the user.

    Args:
        config: The content of ``config.json``; None: the checkpoint has none.
        shapes: Name -> shape of every weight of the state.

    Raises:
        UsageError: The state does not have the weights that the class in the config needs.
    """
    if config is None:
        return f"The checkpoint has no config.json, {_UNCHECKED}. from_pretrained needs the model's config.json."
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return f"transformers is not installed, {_UNCHECKED}."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            transformers = importlib.import_module("transformers")
            conversions: Any = importlib.import_module("transformers.conversion_mapping")
            with _quiet(transformers):
                settings = _settings(transformers, config)
                if getattr(settings, "quantization_config", None):
                    return f"The model is quantized, {_UNCHECKED}."
                return _fitting_model(transformers, conversions, settings, shapes)
        except CkstoreError:
            raise
        except Exception as problem:
            # Whatever a foreign library raises, the export does not need it.
            return (
                f"transformers cannot use config.json ({type(problem).__name__}: {problem})"[:500] + f", {_UNCHECKED}."
            )


def _settings(transformers: Any, config: bytes) -> Any:
    with tempfile.TemporaryDirectory(prefix="ckstore-") as folder:
        (Path(folder) / "config.json").write_bytes(config)
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _fitting_model(transformers: Any, conversions: Any, settings: Any, shapes: Shapes) -> HubModel | str:
    problem: str | None = None
    named = [name for name in settings.architectures or () if hasattr(transformers, name)]
    for class_name in (*named, *_AUTO_CLASSES):
        model = _build(transformers, class_name, settings)
        if model is None:
            continue
        needed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        tied = {name: source for name, source in _tied_of(model).items() if name in needed}
        difference = _difference(model, needed, tied, shapes)
        if difference is None:
            found = _conversions_of(conversions, model)
            return HubModel(type(model).__name__, tied, _saver(transformers, model) if found else None)
        if _is_hub_layout(model, conversions, tied, shapes):
            return HubModel(type(model).__name__, {}, None)
        if class_name in named:
            problem = problem or f"{difference}"
    if problem is None:
        return f"config.json names no class of transformers that has these weights, {_UNCHECKED}."
    raise UsageError(
        f"the weights are not those of {named[0]}, which config.json names: {problem}", where="the selected tensors",
        todo="choose the weights of the model with --only, and remove what is before their names with --strip-prefix",
    )  # fmt: skip


def _build(transformers: Any, class_name: str, settings: Any) -> Any:
    """Return a model without weights; None if the class cannot be built from this config."""
    import torch

    with contextlib.suppress(Exception), torch.device("meta"):
        kind = getattr(transformers, class_name)
        return kind.from_config(settings) if class_name in _AUTO_CLASSES else kind(settings)
    return None


def _tied_of(model: Any) -> dict[str, str]:
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _difference(model: Any, needed: Shapes, tied: Mapping[str, str], shapes: Shapes) -> str | None:
    """Say how a state differs from what a model needs; None: it does not."""
    attributes = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    ignored = [each for attribute in attributes for each in getattr(model, attribute, None) or ()]
    missing = [
        name
        for name in needed
        if name not in shapes and tied.get(name) not in shapes and not any(re.search(each, name) for each in ignored)
    ]
    unexpected = [name for name in shapes if name not in needed]
    wrong = [name for name, shape in shapes.items() if name in needed and needed[name] != shape]
    found = [
        f"{len(names)} {what} ({', '.join(names[:_NAMED_MAX])}{', ...' if len(names) > _NAMED_MAX else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if names
    ]
    return "; ".join(found) or None


def _conversions_of(conversions: Any, model: Any) -> list[Any]:
    """Return how a model's layout differs from the hub's. Prefixes are left alone, as ``save_pretrained`` does."""
    found = conversions.get_model_conversion_mapping(model, add_legacy=False)
    return [each for each in found if type(each).__name__ != "PrefixChange"]


def _is_hub_layout(model: Any, conversions: Any, tied: Mapping[str, str], shapes: Shapes) -> bool:
    """Say whether a state is in the hub's layout already, as the import of a model's files makes it."""
    if not _conversions_of(conversions, model):
        return False
    try:
        revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
        kept = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        saved = {name: tuple(tensor.shape) for name, tensor in revert(model, kept).items()}
    except Exception as problem:
        _log.debug("transformers does not say how it saves %s: %r", type(model).__name__, problem)
        return False
    return saved == {name: shape for name, shape in shapes.items() if name not in tied}


def _saver(transformers: Any, model: Any) -> Callable[[dict[str, Any], Path, int], None]:
    def save(state: dict[str, Any], folder: Path, nbytes_max: int) -> None:
        with warnings.catch_warnings(), _quiet(transformers):
            warnings.simplefilter("ignore")
            try:
                model.save_pretrained(folder, state_dict=state, max_shard_size=nbytes_max)
            except OSError:
                raise
            except Exception as problem:
                why = f"{type(problem).__name__}: {problem}"[:300]
                raise UnsupportedError(
                    f"transformers cannot write the weights in the hub's layout ({why})",
                    where=type(model).__name__,
                    todo="load the state into the model, and call its save_pretrained",
                ) from problem

    return save


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Show neither progress bars nor warnings of transformers."""
    log = transformers.utils.logging
    level, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if had_bars:
            log.enable_progress_bar()


def config_with_dtype(content: bytes, dtype: str) -> bytes:
    """Return a ``config.json`` that names another dtype, if it names one: from_pretrained converts to it."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config, dict) and config.get(key)]
    if not keys:
        return content
    config.update(dict.fromkeys(keys, dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
