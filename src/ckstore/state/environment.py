"""Facts of a process that may change the result of a training step, as texts for people.

A segment of a journal says them in its header, and a checkpoint in replay form in its root. A replay that gives other
bytes names those that differ.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FLAGS = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of torch's optimizers that choose an implementation."""

_TEXT_LENGTH_MAX = 300
"""A segment's header has room for all texts together."""


def environment_of(optimizers: Sequence[Any]) -> dict[str, str]:
    """Return the facts of this process. Those about torch need that it is loaded.

    Args:
        optimizers: The optimizers whose steps are recorded or replayed; none: the user's own code makes the steps.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {"machine": platform.machine(), "python": platform.python_version()}
    parameters = (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])
    facts = {
        "torch": str(torch.__version__),
        "device": _joined(_device_name(torch, parameter.device) for parameter in parameters) or _device_in_use(torch),
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "interop threads": str(torch.get_num_interop_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": _matmul_precision(torch),
        "optimizers": _joined(f"{type(each).__module__}.{type(each).__qualname__}" for each in optimizers),
        **{flag: _flag_of(optimizers, flag) for flag in _FLAGS},
    }
    return {name: text[:_TEXT_LENGTH_MAX] for name, text in facts.items() if text}


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the facts that two environments have and that differ, as a sentence part; empty: none does."""
    both = (name for name in then if name in now and then[name] != now[name])
    return "; ".join(f"{name} {then[name]} then, {now[name]} now" for name in both)


def _joined(texts: Iterable[str]) -> str:
    """Return different texts, each once, in their order."""
    return ", ".join(dict.fromkeys(texts))


def _matmul_precision(torch: Any) -> str:
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        # torch refuses to answer after its older and its newer settings were mixed.
        return ""


def _device_name(torch: Any, device: Any) -> str:
    return str(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)


def _device_in_use(torch: Any) -> str:
    return str(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else "cpu"


def _flag_of(optimizers: Sequence[Any], flag: str) -> str:
    # torch sets some flags at the first step. A flag that was not there then is not compared.
    return _joined(str(group[flag]) for each in optimizers for group in each.param_groups if flag in group)
