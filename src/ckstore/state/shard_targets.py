"""The live shards that a restore fills: which part of which stored tensor each of their blocks takes.

A tensor that is stored in tiles, or of which the live state has a shard only, is replaced by strided views of its
storage, one for each contiguous part. Each view has a block of a live tensor as target. So only the bytes that this
process needs are read, and a view that covers a whole local tensor is read directly into it.

A view with gaps is read into a buffer from its first to its last byte. It is divided so that no buffer is long, and no
long gap is read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckstore.format.tensors import TensorSpec
from ckstore.format.tiles import Box, View, views_of
from ckstore.state.matching import Target
from ckstore.state.tensors import LeafAdapter, LocalPart, TensorLeaf

WINDOW_NBYTES_MAX = 32 << 20
"""A view with gaps that reaches farther is divided."""

GAP_NBYTES_MAX = 1 << 20
"""A longer gap is not read. Chunks, which are read whole, are not much shorter."""


class Split:
    """The tensors of a checkpoint, and views of them for live blocks.

    Attributes:
        tensors: The tensors, and after them the views.
        views: Indices of the views.
    """

    def __init__(self, tensors: Sequence[TensorSpec], adapters: Mapping[str, LeafAdapter]) -> None:
        self.tensors = list(tensors)
        self.views: list[int] = []
        self._adapters = adapters
        self._found: dict[tuple[object, ...], list[View]] = {}

    def split(self, targets: dict[int, list[Target]]) -> None:
        """Replace the targets that take a part of a stored tensor, or a tensor in tiles, by targets of views."""
        for number, each in list(targets.items()):
            spec = self.tensors[number]
            adapter = self._adapters[spec.library]
            whole = []
            for target in each:
                parts = adapter.local_parts(target.item)
                if parts is None and spec.cuts:
                    parts = [LocalPart(Box((0,) * len(spec.shape), spec.shape), target.item)]
                if parts is None:
                    whole.append(target)
                else:
                    self._add(spec, target, parts, targets)
            if whole:
                targets[number] = whole
            else:
                del targets[number]

    def _add(
        self, spec: TensorSpec, target: Target, parts: Sequence[LocalPart], targets: dict[int, list[Target]]
    ) -> None:
        adapter = self._adapters[spec.library]
        for part in parts:
            for view in self._views_of(spec, target.layout.itemsize, part.box):
                block = part.item
                if view.box != part.box:
                    begin = tuple(map(operator.sub, view.box.offsets, part.box.offsets))
                    block = adapter.block_of(block, Box(begin, view.box.sizes))
                leaf = adapter.describe(block, target.path)
                assert leaf is not None
                self.views.append(len(self.tensors))
                targets[len(self.tensors)] = [Target.of(target.path, block, leaf, may_be_replaced=False)]
                self.tensors.append(
                    replace(
                        spec,
                        shape=view.box.sizes,
                        strides=_strides_of(view, leaf),
                        offset=spec.offset + view.offset,
                        is_parameter=False,
                        requires_grad=False,
                        cuts=(),
                    )
                )

    def _views_of(self, spec: TensorSpec, itemsize: int, box: Box) -> list[View]:
        # A model has few distinct layouts, each repeated by many tensors.
        key = spec.shape, spec.strides, itemsize, spec.cuts, box
        views = self._found.get(key)
        if views is None:
            found = _views_of(spec, itemsize, box)
            views = self._found[key] = [part for view in found for part in _divided(view, itemsize)]
        return views


def _views_of(spec: TensorSpec, itemsize: int, box: Box) -> list[View]:
    """Return strided views of a tensor that together show a box of it."""
    if spec.cuts:
        return views_of(spec.shape, itemsize, spec.cuts, box)
    if 0 in box.sizes:
        return []
    # Tensors that one rank stored may have any strides.
    return [View(sum(map(operator.mul, box.offsets, spec.strides)) * itemsize, box, spec.strides)]


def _divided(view: View, itemsize: int) -> Iterator[View]:
    """Yield the parts of a view between which no bytes are read, or which are read one after another."""
    sizes, strides = view.box.sizes, view.strides
    moving = [dim for dim, length in enumerate(sizes) if length > 1]
    outer = max(moving, key=lambda dim: strides[dim], default=None)
    if outer is None:
        yield view
        return
    step = strides[outer] * itemsize
    inner = sum((sizes[dim] - 1) * strides[dim] for dim in moving if dim != outer) * itemsize + itemsize
    if math.prod(sizes) * itemsize >= step * (sizes[outer] - 1) + inner:
        # It has no gaps.
        yield view
        return
    count = max(1, WINDOW_NBYTES_MAX // step) if step - inner <= GAP_NBYTES_MAX else 1
    if count >= sizes[outer]:
        yield view
        return
    for begin in range(0, sizes[outer], count):
        part = _slab_of(view, outer, begin, min(count, sizes[outer] - begin), itemsize)
        if count == 1:
            yield from _divided(part, itemsize)
        else:
            yield part


def _slab_of(view: View, dim: int, begin: int, count: int, itemsize: int) -> View:
    """Return the part of a view with some indices of one dimension."""
    offsets, sizes = list(view.box.offsets), list(view.box.sizes)
    offsets[dim] += begin
    sizes[dim] = count
    offset = view.offset + begin * view.strides[dim] * itemsize
    return View(offset, Box(tuple(offsets), tuple(sizes)), view.strides)


def _strides_of(view: View, leaf: TensorLeaf) -> tuple[int, ...]:
    """Return the strides of a view. Those of dimensions of length 1 have no meaning: the live tensor's are taken."""
    return tuple(
        own if length == 1 else step
        for length, step, own in zip(view.box.sizes, view.strides, leaf.strides, strict=True)
    )
