"""Random states of Python, numpy and torch, of every device, for every rank.

They are part of a training run: without them dropout and shuffling differ after a resume.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckstore.errors import UsageError

_log = logging.getLogger("ckstore")

_DEVICES = ("cuda", "xpu", "mps", "npu", "hpu", "mlu", "musa", "sdaa", "neuron")
"""Modules of torch with random states of their own. Those of plug-ins exist only where the plug-in is installed."""


def capture_rng() -> dict[str, Any]:
    """Return the random states of this process.

    Returns:
        ``python`` (as ``random.getstate``), ``numpy`` (as ``numpy.random.get_state``), ``torch`` (a ByteTensor), and
        for each kind of device that is in use a list with one ByteTensor for each device.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    for name in _DEVICES:
        device = getattr(torch, name, None)
        if device is not None and device.is_available():
            get_all = getattr(device, "get_rng_state_all", None)
            states[name] = get_all() if get_all else [device.get_rng_state()]
    return states


def put_rng(states: Mapping[str, Any]) -> None:
    """Set the random states of this process as ``capture_rng`` returned them.

    Raises:
        UsageError: A state is missing or does not fit. Nothing, or only some of the states, was set.
    """
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        for name in _DEVICES:
            if name in states:
                _put_device(name, states[name])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"the random states cannot be restored ({type(error).__name__}: {error})",
            todo="resume on the kind of device that the run was saved on",
        ) from error


def _put_device(name: str, states: Sequence[Any]) -> None:
    device = getattr(torch, name, None)
    if device is None or not device.is_available():
        _log.warning("the checkpoint has random states of %s devices, and this process has none", name)
        return
    set_all = getattr(device, "set_rng_state_all", None)
    if set_all is None:
        device.set_rng_state(states[0])
        return
    count = device.device_count()
    if count != len(states):
        _log.warning(
            "the checkpoint has random states of %d %s devices, and this process has %d", len(states), name, count
        )
    set_all(states[:count])


def gather_rng() -> list[dict[str, Any]]:
    """Return the random states of all ranks, by rank. Every rank must call this."""
    _, size = rank_and_size()
    if size == 1:
        return [capture_rng()]
    gathered: list[Any] = [None] * size
    torch.distributed.all_gather_object(gathered, capture_rng())
    return gathered


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks; 0 and 1 without torch.distributed."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def put_own_rng(states: Sequence[Mapping[str, Any]]) -> None:
    """Set the random states of this rank from those of all ranks.

    Raises:
        UsageError: A state does not fit.
    """
    rank, size = rank_and_size()
    if size != len(states):
        _log.warning(
            "the checkpoint has random states of %d ranks, and this run has %d: results will differ", len(states), size
        )
    if rank < len(states):
        put_rng(states[rank])
