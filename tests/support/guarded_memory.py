"""Optimizers that own memory of a test: what they own is copied behind their guard, after ``commit_async`` returns."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def owner_of(*arrays, kind=torch.optim.SGD):
    """Return an optimizer that owns these arrays, whatever their dtypes are; its step changes nothing.

    Whoever attaches it keeps it: a store does not.
    """
    bytes_of = [array.reshape(-1).view(np.uint8) for array in arrays]
    assert all(np.shares_memory(one, other) for one, other in zip(arrays, bytes_of, strict=True)), "a copy is no guard"
    return kind([nn.Parameter(torch.from_numpy(each), requires_grad=False) for each in bytes_of], lr=0.1)


def attach_owner(store, *arrays):
    """Attach an optimizer that owns these arrays, and return it: its ``step`` is the guard."""
    optimizer = owner_of(*arrays)
    store.attach(optimizer)
    return optimizer
