"""States and histories for the measurements: one from a real training run, and large ones made from its values.

- ``state_of`` makes a state from the arrays that ``training.py`` has stored of a real run. Every *ratio* (stored
  bytes to bytes of state) is measured only with these.
- ``gpt_state`` has the names and shapes of a GPT of twelve layers with a vocabulary of 16,384, in any size, for
  measuring *speed*. Each tensor is filled from the trained tensor of the same kind and role (weight, first or
  second moment) of one layer: repeated from a random offset, with every element multiplied by a random factor
  within 1/16 of one. Exponents, signs and exact zeros keep their statistics, on which the speed of a codec
  depends. The low mantissa bits of every repetition differ, so that no two chunks are equal and no match finder
  sees a repetition. Do not quote ratios from these states.
- ``synthetic_donors`` replaces the trained values where training takes too long (``--small``, tests).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import training

State = dict[str, Any]
Donors = dict[tuple[str, str], list[np.ndarray]]
"""(kind of tensor, role) -> values of every layer that has one."""

LAYERS = 12
VOCABULARY = 16_384
WINDOW = 1024
ROLES = ("weight", "exp_avg", "exp_avg_sq")
JITTER = 1 / 16
BLOCK = 1 << 20


def trained_donors(cache: Path) -> Donors:
    """Return the values of the trained run, by kind of tensor and role."""
    trained = training.ensure(cache)
    donors: Donors = {}
    for path, values in trained.step(trained.plan.first).items():
        role, _, name = path.partition("/")
        donors.setdefault((_kind_of(name), ROLES[training.ROLES.index(role)]), []).append(values.reshape(-1))
    return donors


def state_of(arrays: training.Arrays, step: int) -> State:
    """Return arrays of the trained run as the state of a training loop; ``uint16`` patterns become bf16."""
    model: dict[str, torch.Tensor] = {}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for path, values in arrays.items():
        role, _, name = path.partition("/")
        if role == "model":
            model[name] = _tensor_of(values)
        else:
            moments.setdefault(name, {})[role] = _tensor_of(values)
    group = {"lr": 6e-4, "betas": training.BETAS, "weight_decay": 0.1, "params": list(range(len(moments)))}
    optimizer = {"state": dict(enumerate(moments.values())), "param_groups": [group]}
    return {"model": model, **({"optimizer": optimizer} if moments else {}), "step": step}


def mixed(arrays: training.Arrays) -> training.Arrays:
    """Return the arrays of mixed precision: bf16 weights rounded from an fp32 master, and the moments."""
    weights = {path: values for path, values in arrays.items() if path.startswith("model/")}
    masters = {path.replace("model/", "master/", 1): values for path, values in weights.items()}
    return {**rounded(weights), **masters, **{path: values for path, values in arrays.items() if path not in weights}}


def rounded(arrays: training.Arrays) -> training.Arrays:
    """Return the weights alone, as bf16 patterns."""
    return {path: training.rne_bf16(values) for path, values in arrays.items() if path.startswith("model/")}


def _tensor_of(values: np.ndarray) -> torch.Tensor:
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def synthetic_donors(seed: int = 0) -> Donors:
    """Return random values whose magnitudes resemble those of a trained run."""
    rng = np.random.default_rng(seed)
    donors: Donors = {}
    for kind in dict.fromkeys(_kind_of(name) for name in shapes_of(64)):
        count = 1 << 16
        scale = np.exp(rng.normal(-9.0, 1.5, count))
        weight = rng.normal(1.0 if kind.startswith("ln_") and kind.endswith("weight") else 0.0, 0.03, count)
        values = (weight, rng.normal(0.0, 1.0, count) * scale, scale**2)
        for role, drawn in zip(ROLES, values, strict=True):
            donors[kind, role] = [drawn.astype(np.float32)]
    return donors


def shapes_of(width: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of a GPT of twelve layers."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, width), "wpe.weight": (WINDOW, width)}
    for layer in range(LAYERS):
        name = f"h.{layer}."
        shapes |= {
            name + "ln_1.weight": (width,),
            name + "ln_1.bias": (width,),
            name + "attn.c_attn.weight": (3 * width, width),
            name + "attn.c_proj.weight": (width, width),
            name + "ln_2.weight": (width,),
            name + "ln_2.bias": (width,),
            name + "mlp.c_fc.weight": (4 * width, width),
            name + "mlp.c_proj.weight": (width, 4 * width),
        }
    return shapes


def width_for(nbytes: int) -> int:
    """Return the width, a multiple of 8, whose state is closest to this size."""
    return min(range(8, 8192, 8), key=lambda width: abs(_state_nbytes(width) - nbytes))


def gpt_state(nbytes: int, *, donors: Donors, seed: int = 0) -> State:
    """Return the training state of a GPT in fp32 with AdamW: 98 parameters and 196 moments, 294 tensors.

    Args:
        nbytes: Wanted size; the width is chosen to be close to it.
        donors: The source of the values.
        seed: A different seed changes bits in every chunk.
    """
    shapes = shapes_of(width_for(nbytes))
    jobs: list[tuple[torch.Tensor, list[np.ndarray], int]] = []
    model: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        made = {role: torch.empty(shape) for role in ROLES}
        jobs += [(made[role], donors[_kind_of(name), role], len(jobs) + at) for at, role in enumerate(ROLES)]
        model[name] = made["weight"]
        moments[number] = {"exp_avg": made["exp_avg"], "exp_avg_sq": made["exp_avg_sq"]}

    def fill(job: tuple[torch.Tensor, list[np.ndarray], int]) -> None:
        target, layers, number = job
        _fill(target.numpy().reshape(-1), layers[number % len(layers)], np.random.default_rng((seed, number)))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(fill, jobs))
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(shapes)))}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "step": 1000}


def _fill(target: np.ndarray, donor: np.ndarray, rng: np.random.Generator) -> None:
    position = int(rng.integers(len(donor)))
    for begin in range(0, len(target), BLOCK):
        block = target[begin : begin + BLOCK]
        done = 0
        while done < len(block):
            piece = donor[position : position + len(block) - done]
            block[done : done + len(piece)] = piece
            done += len(piece)
            position = (position + len(piece)) % len(donor)
        factor = rng.random(len(block), dtype=np.float32)
        factor *= 2 * JITTER
        factor += 1 - JITTER
        block *= factor


def _kind_of(name: str) -> str:
    """Return the name of a parameter without the number of its layer."""
    words = name.split(".")
    return ".".join(words[2:] if words[0] == "h" else words)


def _state_nbytes(width: int) -> int:
    return 12 * (width * (VOCABULARY + WINDOW) + LAYERS * (12 * width * width + 4 * width))


def tensors_of(state: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a nested state with its dotted path."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, child in state.items():
            yield from tensors_of(child, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for number, child in enumerate(state):
            yield from tensors_of(child, f"{path}.{number}")


def nbytes_of(state: object) -> int:
    """Return the bytes of all tensors of a state."""
    return sum(tensor.nbytes for _, tensor in tensors_of(state))


def blank_like(state: Any) -> Any:
    """Return the same structure with zeros in its tensors; every page has been written to."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state).fill_(0)
    if isinstance(state, dict):
        return {key: blank_like(child) for key, child in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(blank_like(child) for child in state)
    return state


def clear(state: object) -> None:
    """Set every tensor of a state to zero, so that a load has to restore every byte."""
    for _, tensor in tensors_of(state):
        tensor.zero_()


def is_same(first: object, second: object) -> bool:
    """Return whether two states have the same tensors under the same paths, bit for bit."""
    left, right = dict(tensors_of(first)), dict(tensors_of(second))
    return left.keys() == right.keys() and all(
        tensor.dtype == right[path].dtype and torch.equal(_bits(tensor), _bits(right[path]))
        for path, tensor in left.items()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.int32) if flat.element_size() == 4 else flat.view(torch.uint8)
