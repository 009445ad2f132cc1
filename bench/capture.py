"""How much time ``commit_async`` saves by caching the structure of a state: ``python -m bench.capture``.

Captures the states of an Adam optimizer with and without the cache, alternately. Prints median, minimum and maximum of
the processor time of a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ckstore.state.capture import capture, loaded_adapters
from ckstore.state.capture_cache import CaptureCache

TENSOR_COUNTS = {294: 40, 10_000: 15}
"""Tensors of a state, and how often it is captured in each way."""


def state_of(tensor_count: int) -> dict[str, object]:
    """Return a state of about this many small tensors: parameters and two moments of each."""
    count = tensor_count // 3
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(16, 16), "exp_avg_sq": torch.zeros(16, 16)}
        for index in range(count)
    }
    model = {f"layer{index // 7}.weight{index % 7}": torch.zeros(16, 16) for index in range(count)}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(count))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}, "step": 3}


def processor_seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begun = time.process_time()
    call()
    return time.process_time() - begun


def main() -> None:
    """Measure, and print one line for each size."""
    adapters = loaded_adapters()
    for tensor_count, repeats in TENSOR_COUNTS.items():
        state, cache = state_of(tensor_count), CaptureCache()
        cache.capture(state, adapters)
        whole, cached = [], []
        for _ in range(repeats):
            whole.append(processor_seconds(lambda: capture(state, adapters)))  # noqa: B023 - called right here
            cached.append(processor_seconds(lambda: cache.capture(state, adapters)))  # noqa: B023
        for name, seconds in (("whole", whole), ("cached", cached)):
            middle, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
            print(f"{tensor_count:6,} tensors, {name:6}: {middle:7.2f} ms ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
