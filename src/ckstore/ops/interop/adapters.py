"""Names of the weights of a PEFT adapter: as they are in a model's state, and as PEFT saves them.

A model's state contains the base model and one or more adapters: ``...q_proj.lora_A.default.weight``. PEFT saves an
adapter alone, without its name: ``base_model.model...q_proj.lora_A.weight``. Only LoRA is translated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckstore.errors import UnsupportedError
from ckstore.ops.interop.weights import Weight

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_STEM = "adapter_model"

_PREFIX = "base_model.model."
_LORA = re.compile(r"\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?=\.|$)")
_IN_MODEL = re.compile(
    r"(?P<layer>.+\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.(?P<adapter>[^.]+)(?P<end>\.weight|\.bias)?"
)
_COMMIT_SAVED = "commit the result of peft.get_peft_model_state_dict(model) instead of model.state_dict()"


def is_adapter(names: Iterable[str]) -> bool:
    """Say whether a state contains a LoRA adapter."""
    return any(_LORA.search(name) for name in names)


def adapters_of(
    weights: Sequence[Weight], files: Mapping[str, bytes]
) -> tuple[dict[str, list[Weight]], dict[str, str]]:
    """Return the weights of each adapter as PEFT saves them, by file name, and the weights that are left out.

    Args:
        weights: The weights of the state.
        files: The small files of the checkpoint.

    Raises:
        UnsupportedError: The checkpoint lacks an adapter's config, or the config needs more than LoRA matrices.
    """
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
        return {f"{ADAPTER_STEM}.safetensors": list(weights)}, {}
    by_file: dict[str, list[Weight]] = {}
    for adapter, chosen in found.items():
        folder = _folder_of(adapter, found, files)
        _check_config(_require(files, f"{folder}{ADAPTER_CONFIG}", chosen[0].name), f"{folder}{ADAPTER_CONFIG}")
        by_file[f"{folder}{ADAPTER_STEM}.safetensors"] = chosen
    more = f" and {len(base) - 1} more" if len(base) > 1 else ""
    return by_file, {f"{base[0]}{more}": "of the base model, not of an adapter"} if base else {}


def _saved_name(layer: str, end: str | None) -> str:
    # A magnitude vector is a module in the model, and a bare parameter in the file.
    name = layer if layer.endswith("magnitude_vector") else f"{layer}{end or ''}"
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"


def _folder_of(adapter: str, found: Mapping[str, object], files: Mapping[str, bytes]) -> str:
    """Return the folder of an adapter as PEFT names it: the default adapter is in the folder itself."""
    is_root = adapter == "default" or (len(found) == 1 and f"{adapter}/{ADAPTER_CONFIG}" not in files)
    return "" if is_root else f"{adapter}/"


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
