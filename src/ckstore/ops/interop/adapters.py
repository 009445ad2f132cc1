"""Names of the weights of a PEFT adapter: as they are in a model's state, and as PEFT saves them.

A model's state contains the base model and one or more adapters: ``...q_proj.lora_A.default.weight``. PEFT saves an
adapter alone, without its name: ``base_model.model...q_proj.lora_A.weight``. Only LoRA is translated.

A state can also have adapters of any kind as PEFT saves them, in the part ``adapters``: name of an adapter -> its
tensors. A Trainer with ckstore commits them like this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from ckstore.errors import UnsupportedError
from ckstore.format.tree import DictNode, Node, TensorNode, items_of
from ckstore.ops.interop.weights import ADAPTERS_KEY, MODEL_KEY, Weight

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"

_PEFT_PREFIX = "base_model."
_PREFIX = "base_model.model."
_PROMPT = "prompt_embeddings"
_PROMPT_ENCODER = "prompt_encoder."
_LISTED_MAX = 3
_LORA = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?=\.|$)")
_IN_MODEL = re.compile(
    r"(?P<layer>.+\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?P<adapter>[^.]+)(?P<end>\.weight|\.bias)?"
)
_COMMIT_SAVED = "commit the result of peft.get_peft_model_state_dict(model) instead of model.state_dict()"


def has_adapters_part(tree: Node, files: Iterable[str]) -> bool:
    """Say whether the part ``adapters`` of a state contains adapters of PEFT: LoRA, or any for which there is a config.

    Args:
        tree: The state.
        files: Names of the small files of the checkpoint.
    """
    part = dict(items_of(tree)).get(ADAPTERS_KEY) if isinstance(tree, DictNode) else None
    if not isinstance(part, DictNode):
        return False
    adapters = dict(items_of(part))
    names: list[str] = []
    for tensors in adapters.values():
        if not isinstance(tensors, DictNode) or not all(isinstance(node, TensorNode) for _, node in items_of(tensors)):
            return False
        names += [str(name) for name, _ in items_of(tensors)]
    configs = {ADAPTER_CONFIG, *(f"{adapter}/{ADAPTER_CONFIG}" for adapter in adapters)}
    return any(_LORA.search(name) for name in names) or (bool(names) and not configs.isdisjoint(files))


def is_adapter(weights: Iterable[Weight]) -> bool:
    """Say whether some of the weights belong to an adapter: in the part ``adapters``, or LoRA in a model's state."""
    return any(each.adapter is not None or _LORA.search(each.name) for each in weights)


def adapters_of(
    weights: Sequence[Weight], files: Mapping[str, bytes]
) -> tuple[dict[str, list[Weight]], dict[str, str]]:
    """Return the weights of each adapter as PEFT saves them, by file name, and the weights that are left out.

    Args:
        weights: The weights of the state.
        files: The small files of the checkpoint.

    Raises:
        UnsupportedError: The checkpoint lacks an adapter's config, the config needs more than LoRA matrices, PEFT would
            not load a name, or there are trained weights that do not belong to an adapter.
    """
    if any(each.adapter is not None for each in weights):
        return _saved_adapters(weights, files)
    found: dict[str, list[Weight]] = {}
    base: list[str] = []
    for weight in weights:
        match = _IN_MODEL.fullmatch(weight.name)
        if match is None or (match["end"] is None and match["adapter"] in ("weight", "bias")):
            base.append(weight.name)
            continue
        name = _saved_name(match["layer"], match["end"])
        found.setdefault(match["adapter"], []).append(replace(weight, name=name))
    if not found:
        # The state is in the layout in which PEFT saves it.
        _require(files, ADAPTER_CONFIG, weights[0].name)
        _check_names(weights)
        return {f"{ADAPTER_STEM}.safetensors": list(weights)}, {}
    by_file: dict[str, list[Weight]] = {}
    for adapter, chosen in found.items():
        folder = _folder_of(adapter, found, files)
        _check_config(_require(files, f"{folder}{ADAPTER_CONFIG}", chosen[0].name), f"{folder}{ADAPTER_CONFIG}")
        by_file[f"{folder}{ADAPTER_STEM}.safetensors"] = chosen
    more = f" and {len(base) - 1} more" if len(base) > 1 else ""
    return by_file, {f"{base[0]}{more}": "of the base model, not of an adapter"} if base else {}


def _saved_adapters(
    weights: Sequence[Weight], files: Mapping[str, bytes]
) -> tuple[dict[str, list[Weight]], dict[str, str]]:
    """Do what ``adapters_of`` does, for the part ``adapters``."""
    found: dict[str, list[Weight]] = {}
    others: list[str] = []
    for weight in weights:
        if weight.adapter is None:
            others.append(weight.name)
        else:
            found.setdefault(weight.adapter, []).append(weight)
    left_out = {}
    if any(each.name == _PROMPT for chosen in found.values() for each in chosen):
        encoders = [name for name in others if name.startswith(_PROMPT_ENCODER)]
        left_out = dict.fromkeys(encoders, "PEFT saves the prompt that it computes, without the encoder")
        others = [name for name in others if name not in left_out]
    if others:
        more = f", and {len(others) - _LISTED_MAX} more" if len(others) > _LISTED_MAX else ""
        raise UnsupportedError(
            "there are weights outside of the adapters, and an adapter's folder cannot contain them",
            where=", ".join(others[:_LISTED_MAX]) + more,
            todo=f"export the adapters alone with --only '{ADAPTERS_KEY}.*', and these weights to another folder with "
            f"--only '{MODEL_KEY}.*'",
        )
    by_file = {}
    for adapter, chosen in found.items():
        folder = _folder_of(adapter, found, files)
        _require(files, f"{folder}{ADAPTER_CONFIG}", chosen[0].name)
        _check_names(chosen)
        by_file[f"{folder}{ADAPTER_STEM}.safetensors"] = chosen
    return by_file, left_out


def _check_names(weights: Sequence[Weight]) -> None:
    """Refuse names that PEFT would ignore without an error: it would then use untrained weights."""
    names = [each.name for each in weights]
    wrong = [name for name in names if not name.startswith(_PEFT_PREFIX)]
    # A prompt is not part of the base model.
    if wrong and _PROMPT not in names:
        is_below = f".{_PEFT_PREFIX}" in wrong[0]
        raise UnsupportedError(
            f"PEFT would not load a weight of an adapter whose name does not begin with {_PEFT_PREFIX!r}",
            where=wrong[0],
            todo="remove what is before it with --strip-prefix" if is_below else "commit the state of a PeftModel",
        )


def _saved_name(layer: str, end: str | None) -> str:
    # A magnitude vector is a module in the model, and a bare parameter in the file.
    name = layer if layer.endswith("magnitude_vector") else f"{layer}{end or ''}"
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"


def _folder_of(adapter: str, found: Mapping[str, object], files: Mapping[str, bytes]) -> str:
    """Return the folder of an adapter as PEFT names it: the default adapter is in the folder itself."""
    if adapter == "default" or (len(found) == 1 and f"{adapter}/{ADAPTER_CONFIG}" not in files):
        return ""
    if adapter.startswith(".") or "\0" in adapter or PurePosixPath(adapter).parts != (adapter,):
        raise UnsupportedError("the name of an adapter is not a name of a folder", where=repr(adapter),
                               todo="choose other adapters with --only")  # fmt: skip
    return f"{adapter}/"


def _require(files: Mapping[str, bytes], name: str, weight: str) -> bytes:
    if name not in files:
        raise UnsupportedError(
            f"the weights are of a PEFT adapter, but the checkpoint has no {name}", where=weight,
            todo=f'commit it with the state: {{"model": ..., "files": {{"{name}": its bytes}}}}',
        )  # fmt: skip
    return files[name]


def _check_config(content: bytes, name: str) -> None:
    """Refuse an adapter that consists of more than LoRA matrices."""
    try:
        config = json.loads(content)
        kind = config.get("peft_type")
        others = [key for key in ("modules_to_save", "trainable_token_indices", "target_parameters") if config.get(key)]
        others += ["bias"] if config.get("bias") not in (None, "none") else []
    except (ValueError, AttributeError, RecursionError):
        raise UnsupportedError("an adapter's config is not a JSON object", where=name) from None
    if kind != "LORA" or others:
        what = f"with {' and '.join(others)}" if kind == "LORA" else f"of type {kind!r}"
        raise UnsupportedError(f"an adapter {what} cannot be exported from a model's state", where=name,
                               todo=_COMMIT_SAVED)  # fmt: skip
