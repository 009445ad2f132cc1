"""Owners of memory of a test: what they own is copied behind their guard, after ``commit_async`` returns."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle


class Owner:
    """As much of an optimizer as a store asks of one: what it owns, and hooks that are called when it steps.

    Its step changes nothing. The first optimizer of torch that a process makes imports a compiler, for seconds.
    """

    def __init__(self, tensors, *, handle=RemovableHandle):
        self.param_groups, self.state = [{"params": list(tensors)}], {}
        self.before, self.after = OrderedDict(), OrderedDict()
        self._handle = handle

    def register_step_pre_hook(self, hook):
        return self._register(self.before, hook)

    def register_step_post_hook(self, hook):
        return self._register(self.after, hook)

    def _register(self, hooks, hook):
        handle = self._handle(hooks)
        hooks[handle.id] = hook
        return handle

    def step(self):
        for hooks in (self.before, self.after):
            for hook in list(hooks.values()):
                hook(self, (), {})


def attach_owner(store, *arrays):
    """Attach an owner of these arrays, whatever their dtypes are, and return it; a store does not keep it alive."""
    parts = [array.reshape(-1).view(np.uint8) for array in arrays]
    assert all(map(np.shares_memory, arrays, parts)), "a copy is no guard"
    owner = Owner(map(torch.from_numpy, parts))
    store.attach(owner)
    return owner
