"""One state of torch on its way into an arena of its own, with real threads, for tests of devices."""

from __future__ import annotations

from ckstore.background.arena import Arena
from ckstore.background.arena_layout import plan_layout
from ckstore.background.copying import CopyPool
from ckstore.background.device_copy import kinds_of, starts_of
from ckstore.background.staging import Staging
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import TorchAdapter


class Staged:
    """A state on its way; a kind says where it is taken to lie, and when it is copied."""

    def __init__(self, state, guarded=(), *, kind=None):
        self.captured = capture(state, [TorchAdapter()])
        starts = starts_of(self.captured.storages)
        found = kinds_of(self.captured, starts, guarded)
        self.kinds = found if kind is None else [kind] * len(found)
        self.stowage = plan_layout(self.captured.storages, self.kinds, [])
        self.arena, self.crew, self.events = Arena.create(self.stowage.end), CopyPool(2), []
        self.slot = self.arena.slots[0]
        self.slot.start(1, self.stowage.end)
        self.staging = Staging(
            self.captured, self.stowage, starts, self.slot, self.crew, bell=-1, is_checked=False,
            on_staged=lambda: self.events.append("staged"), on_failed=self.events.append,
        )  # fmt: skip

    def content(self):
        assert self.staging.is_over.wait(60)
        assert self.events == ["staged"]
        sizes = [storage.nbytes for storage in self.captured.storages]
        return [bytes(self.slot.view(place, n)) for place, n in zip(self.stowage.places, sizes, strict=True)]

    def close(self):
        self.crew.close()
        self.arena.close()
