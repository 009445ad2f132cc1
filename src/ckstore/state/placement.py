"""The last step of a restore: a destination for the bytes of each storage, and the state built from them.

Invariants:
- All checks are made before the first destination is returned.
- A storage is read directly into live tensors only if they view every byte of it with the stored layout. Otherwise it
  is read into a host buffer, which is freed as soon as its bytes have been copied to their targets.
- Tensors that shared a storage share one again. A tensor that occurred at two paths is one object again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckstore.errors import MalformedError, NotFoundError, UnsupportedError
from ckstore.format.narrowing import narrow
from ckstore.format.tensors import StorageSpec, TensorSpec, byte_strides_of, check_layout, extent_of, is_dense
from ckstore.format.tree import (
    BUILT_IN,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    Selection,
    TensorNode,
    TupleNode,
    ValueNode,
    check_tree,
    decode_tree,
    is_bare_tensor,
    libraries_of,
    library_of,
    library_of_conversion,
    new_dict,
    parts_of,
    tensors_of,
)
from ckstore.state.loading import Match, match_state
from ckstore.state.memory import address_of, allocate, writable_view_of
from ckstore.state.named_types import distinct
from ckstore.state.numpy_adapter import BytesAdapter, NumpyAdapter
from ckstore.state.shard_targets import Split
from ckstore.state.standard_types import (
    PACKED_NAMES,
    PLAIN,
    build_standard,
    is_standard,
    unknown_conversion,
    unpack_numbers,
)
from ckstore.state.tensors import LeafAdapter, TensorLeaf
from ckstore.state.values import LONG_TEXT, converter_named, decode_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def libraries_needed(tree: Node, tensors: Sequence[TensorSpec]) -> set[str]:
    """Return the libraries that a tree and its tensors need beyond numpy, such as ``{"torch"}``."""
    named = {tensors[index].library for index in tensors_of(tree) if 0 <= index < len(tensors)}
    return (named | libraries_of(tree)) - {"numpy", "bytes"}


def prepare_restore(
    tree: Node,
    tensors: Sequence[TensorSpec],
    storages: Sequence[StorageSpec],
    *,
    into: object = None,
    only: str | Sequence[str] | None = None,
    device: object = None,
    adapters: Sequence[LeafAdapter] = (),
) -> RestoreTargets:
    """Check the checkpoint and the arguments, and decide where every byte goes; nothing is written yet.

    Args:
        tree: The decoded tree of the checkpoint; not trusted.
        tensors: Its tensors; not trusted.
        storages: Its storages.
        into: A live state to fill; None: build a new one.
        only: Globs over dotted paths; None: everything.
        device: Device of new torch tensors; None: the CPU.
        adapters: Adapters of tensor libraries other than numpy.

    Raises:
        MalformedError: ckstore does not write such a tree or such tensors.
        UnsupportedError: A dtype, library or converter is missing in this process.
        NotFoundError: ``only`` matches nothing.
        UsageError: ``into`` does not fit the checkpoint, or ``device`` does not exist.
    """
    check_tree(tree, len(tensors))
    selection = None if only is None else Selection(only, tree)
    chosen = tree if selection is None else selection.prune(tree)
    if chosen is None:
        raise NotFoundError(
            "no leaf of the checkpoint matches", where=repr(only), todo="list its paths with `ckstore show`"
        )
    every: tuple[LeafAdapter, ...] = (NumpyAdapter(), BytesAdapter(), *adapters)
    by_library = {adapter.library: adapter for adapter in every}
    builder = _Builder(tensors, by_library, device)
    builder.check_tensors([tensors[index] for index in tensors_of(chosen)], storages)
    builder.check_values(chosen)
    match = None if into is None else match_state(chosen, tensors, into, every, selection)
    if match is not None and (any(adapter.takes_shards for adapter in every) or any(spec.cuts for spec in tensors)):
        return _with_shards(chosen, storages, builder, match)
    return RestoreTargets(chosen, storages, builder, match, tensors_of(chosen))


def _with_shards(tree: Node, storages: Sequence[StorageSpec], builder: _Builder, match: Match) -> RestoreTargets:
    """Return targets in which live shards take only the parts of stored tensors that they hold."""
    split = Split(builder.tensors, builder.adapters)
    split.split(match.targets)
    needed = [number for number in tensors_of(tree) if number in match.targets or number in match.created]
    used = [*needed, *split.views]
    if split.views:
        parted = {split.tensors[number].storage for number in split.views}
        chosen = [number for number in used if split.tensors[number].storage in parted]
        builder.tensors, storages = narrow(split.tensors, storages, chosen, is_exact=True)
    return RestoreTargets(tree, storages, builder, match, used)


class _Builder:
    """Builds state from nodes."""

    def __init__(self, tensors: Sequence[TensorSpec], adapters: dict[str, LeafAdapter], device: object) -> None:
        self.tensors = tensors
        self.adapters = adapters
        self.devices = {
            name: None if device is None else adapter.check_device(device) for name, adapter in adapters.items()
        }
        self.memories: dict[int, NDArray[np.uint8]] = {}
        self._adopted: dict[tuple[int, str], object] = {}
        self._whole: dict[tuple[object, ...], object] = {}
        self._views_of: dict[int, set[tuple[object, ...]]] = {}
        self._built: dict[int, object] = {}

    def adapter_of(self, library: str) -> LeafAdapter:
        """Return the adapter of a library; raise UnsupportedError without one."""
        try:
            return self.adapters[library]
        except KeyError:
            raise UnsupportedError(
                "the state has leaves of a library that is not available",
                where=repr(library[:80]),
                todo=f"install {library[:80]}, or select other leaves with only=",
            ) from None

    def check_tensors(self, specs: Iterable[TensorSpec], storages: Sequence[StorageSpec]) -> None:
        """Refuse tensors that cannot be built."""
        # A model has few distinct layouts, each repeated by many tensors.
        checked: set[tuple[object, ...]] = set()
        for spec in specs:
            number = spec.storage
            nbytes = storages[number].nbytes if 0 <= number < len(storages) else -1
            flags = (spec.is_parameter, spec.requires_grad)
            facts = (nbytes, spec.offset, spec.shape, spec.strides, spec.dtype, spec.library, flags)
            if facts not in checked:
                itemsize = self.adapter_of(spec.library).itemsize_of(spec)
                if nbytes < 0:
                    raise MalformedError("a tensor refers to a storage that does not exist", where=f"storage {number}")
                check_layout(spec, itemsize, nbytes)
                checked.add(facts)

    def check_values(self, node: Node) -> None:
        """Refuse values, keys and converters that cannot be restored; content of chunks is checked later."""
        if isinstance(node, ConvertedNode):
            self._check_conversion(node)
        if isinstance(node, ConvertedNode) and not tensors_of(node.child) and _is_built_in(node):
            self.make(node)
        else:
            for part in parts_of(node):
                if not is_bare_tensor(part):
                    self.check_values(part)
        if isinstance(node, ValueNode):
            self.value(node)
        elif isinstance(node, DictNode) and any(type(key) is OtherKey for key in node.keys):
            self._keys(node)

    def _check_conversion(self, node: ConvertedNode) -> None:
        if not node.name.startswith(BUILT_IN):
            converter_named(node.name)
        elif (library := library_of_conversion(node.name)) is not None:
            self.adapter_of(library)
        elif node.name != LONG_TEXT and node.name not in PACKED_NAMES and not is_standard(node.name):
            raise unknown_conversion(node.name)

    def value(self, node: ValueNode) -> object:
        """Build a plain value."""
        library = library_of(node.type)
        return decode_plain(node) if library is None else self.adapter_of(library).decode_value(node.type, node.value)

    def adopt(self, storage: int, library: str) -> object:
        """Pass a filled buffer to a library, once, on the requested device."""
        key = (storage, library)
        if key not in self._adopted:
            adapter = self.adapters[library]
            self._adopted[key] = adapter.adopt(self.memories[storage], self.devices[library])
        return self._adopted[key]

    def tensor(self, index: int) -> object:
        """Build a tensor, once."""
        if index not in self._built:
            spec = self.tensors[index]
            if spec.cuts:
                spec, adopted = replace(spec, offset=0, cuts=()), self._assembled(spec)
            else:
                adopted = self.adopt(spec.storage, spec.library)
            self._built[index] = self.adapters[spec.library].build(spec, adopted)
        return self._built[index]

    def _assembled(self, spec: TensorSpec) -> object:
        """Return the memory of a tensor in tiles, once for all tensors that view it; free that of the tiles."""
        view = _view_of(spec)
        if view not in self._whole:
            self._whole[view] = self.adapters[spec.library].assemble(spec, self.adopt(spec.storage, spec.library))
            if not self._views_of:
                for each in self.tensors:
                    self._views_of.setdefault(each.storage, set()).add(_view_of(each))
            if len(self._views_of[spec.storage]) == 1:
                self.memories.pop(spec.storage, None)
                del self._adopted[spec.storage, spec.library]
        return self._whole[view]

    def make(self, node: Node) -> object:
        """Build a part of the state."""
        if isinstance(node, ValueNode):
            return self.value(node)
        if isinstance(node, TensorNode):
            tensor = self.tensor(node.tensor)
            self.attach(tensor, node)
            return tensor
        if isinstance(node, ListNode):
            return [self.make(child) for child in node.children]
        if isinstance(node, TupleNode):
            return tuple(self.make(child) for child in node.children)
        if isinstance(node, DictNode):
            return self._mapping(node)
        return self._converted(node)

    def _converted(self, node: ConvertedNode) -> object:
        name, child = node.name, self.make(node.child)
        if not name.startswith(BUILT_IN):
            return converter_named(name).from_state(child)
        library = library_of_conversion(name)
        if library is not None:
            return self.adapter_of(library).build_converted(name, child)
        if name == LONG_TEXT:
            return _long_text(child)
        if name == PLAIN:
            return self._plain(child)
        return unpack_numbers(name, child) if name in PACKED_NAMES else build_standard(name, child)

    def _plain(self, content: object) -> object:
        """Build a long plain value from its tree, which is stored in a chunk."""
        if not isinstance(content, bytes):
            raise MalformedError("a long plain value is not a tree")
        tree = decode_tree(content, tensor_count=0, where="a long plain value")
        check_tree(tree, 0)
        return self.make(tree)

    def _mapping(self, node: DictNode) -> dict[Any, Any]:
        made = new_dict(node)
        for key, child in zip(self._keys(node), node.children, strict=True):
            made[key] = self.make(child)
        if node.metadata is not None:
            made._metadata = self.make(node.metadata)  # type: ignore[attr-defined]
        self.attach(made, node)
        return made

    def key(self, key: Key) -> Any:
        """Build a key."""
        return self.make(key.node) if isinstance(key, OtherKey) else key

    def _keys(self, node: DictNode) -> list[Any]:
        try:
            return distinct(map(self.key, node.keys))
        except (TypeError, ValueError):
            raise MalformedError("a dict of the state has two equal keys, or an unhashable one") from None

    def attach(self, made: object, node: DictNode | TensorNode) -> None:
        """Set the stored Python attributes on a tensor or dict."""
        if node.attributes is not None:
            # Not by setattr, which would run property setters.
            attributes: Any = self.make(node.attributes)
            getattr(made, "__dict__", {}).update(attributes)


def _view_of(spec: TensorSpec) -> tuple[object, ...]:
    return spec.storage, spec.offset, spec.dtype, spec.shape, spec.strides, spec.cuts


def _is_built_in(node: Node) -> bool:
    """Say whether building a node runs no converter of the user."""
    is_users = isinstance(node, ConvertedNode) and not node.name.startswith(BUILT_IN)
    return not is_users and all(map(_is_built_in, parts_of(node)))


def _long_text(content: object) -> str:
    try:
        if isinstance(content, bytes):
            return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        pass
    raise MalformedError("a long str is not UTF-8")


class _LiveSpan(NamedTuple):
    """The range of bytes that a live tensor views, relative to element (0, ..., 0); dense: it views all of them."""

    lo: int
    hi: int
    is_dense: bool


class RestoreTargets:
    """Destinations for the storages of one restore.

    For every index in ``storages``: get its ``destination``, fill it, call ``complete``. Indices may be processed in
    any order and on several threads, each index on one thread at a time. Then call ``finish``.
    """

    def __init__(
        self,
        tree: Node,
        storages: Sequence[StorageSpec],
        builder: _Builder,
        match: Match | None,
        used: Sequence[int],
    ) -> None:
        self._tree = tree
        self._specs = storages
        self._builder = builder
        self._match = match
        self._users: dict[int, list[int]] = {}
        for index in used:
            self._users.setdefault(builder.tensors[index].storage, []).append(index)
        self._completed: set[int] = set()
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        self._direct: dict[int, int] = {}
        """Addresses of live memory by storage; the match keeps it alive."""
        self._spans: dict[tuple[object, ...], _LiveSpan | None] = {}
        if match is not None:
            for storage in self._users:
                self._direct_to_live(storage, match)
        for storage in self._users:
            if storages[storage].nbytes == 0:
                self.destination(storage)
                self.complete(storage)

    @property
    def storages(self) -> list[int]:
        """Indices of the storages to read, in the order of the tree."""
        return [storage for storage in self._users if self._specs[storage].nbytes]

    @property
    def tables(self) -> tuple[tuple[TensorSpec, ...], tuple[StorageSpec, ...]]:
        """The tensors and storages that ``storages`` counts in: those of the checkpoint, and parts of them after it."""
        return tuple(self._builder.tensors), tuple(self._specs)

    @property
    def tree(self) -> Node:
        """The tree of the selected leaves."""
        return self._tree

    @property
    def warnings(self) -> list[str]:
        """Warnings for the user; complete after ``finish``."""
        return [] if self._match is None else list(self._match.warnings)

    @property
    def keeps_all(self) -> bool:
        """Whether every destination is the final place of its bytes, so that no buffer is freed before ``finish``."""
        return all(storage in self._direct or self._is_final(storage) for storage in self.storages)

    def _is_final(self, storage: int) -> bool:
        libraries = {self._builder.tensors[index].library for index in self._users[storage]}
        return self._match is None and all(self._builder.devices[library] is None for library in libraries)

    def is_direct(self, storage: int) -> bool:
        """Say whether the storage is read directly into live tensors."""
        return storage in self._direct

    def destination(self, storage: int) -> memoryview:
        """Return writable memory for the whole storage; later calls return the same memory.

        Raises:
            CapacityError: There is not enough memory.
        """
        assert storage in self._users
        assert storage not in self._completed
        if (direct := self._direct.get(storage)) is not None:
            return writable_view_of(direct, self._specs[storage].nbytes, self._match)
        if storage not in self._buffers:
            self._buffers[storage] = allocate(self._specs[storage].nbytes)
        return self._buffers[storage].data

    def addresses(self, storages: Iterable[int]) -> list[int]:
        """Return the address of each destination; it is valid until ``complete``.

        Raises:
            CapacityError: There is not enough memory.
        """
        found: list[int] = []
        for storage in storages:
            if (direct := self._direct.get(storage)) is not None:
                found.append(direct)
            else:
                self.destination(storage)
                found.append(address_of(self._buffers[storage]))
        return found

    def complete(self, *storages: int) -> None:
        """Record that the destinations are filled; copy the bytes from buffers to their targets."""
        assert self._completed.isdisjoint(storages)
        written: dict[str, list[object]] = {}
        for storage in storages:
            if storage in self._direct:
                del self._direct[storage]
                self._list_written(storage, written)
            else:
                self._copy_from_buffer(storage)
        for library, items in written.items():
            self._builder.adapters[library].mark_written(items)
        self._completed.update(storages)

    def finish(self) -> Any:
        """Return the state; every storage must be complete.

        With ``into``, this replaces plain values, adds missing leaves and calls ``load_state_dict``.
        """
        assert self._completed == set(self._users)
        if self._match is None:
            return self._builder.make(self._tree)
        return self._match.step(self._builder.make)

    def _direct_to_live(self, storage: int, match: Match) -> None:
        """Make live tensors the destination of a storage, if they have its layout and view every byte."""
        bases: set[int] = set()
        ranges: list[tuple[int, int]] = []
        for index in self._users[storage]:
            spec = self._builder.tensors[index]
            targets = match.targets.get(index)
            if index in match.created or not targets:
                return
            for target in targets:
                span = self._span_of(spec, target.layout)
                if span is None:
                    return
                bases.add(target.origin - spec.offset)
                if span.is_dense:
                    ranges.append((spec.offset + span.lo, spec.offset + span.hi))
        nbytes = self._specs[storage].nbytes
        if nbytes and len(bases) == 1 and _covers(ranges, nbytes):
            self._direct[storage] = bases.pop()

    def _span_of(self, spec: TensorSpec, layout: TensorLeaf) -> _LiveSpan | None:
        """Return the bytes that live tensors with this layout view; None: a tensor like ``spec`` cannot be read there.

        The match keeps the layout alive, so that its id is unique.
        """
        key = (id(layout), spec.strides)
        if key not in self._spans:
            memory, shape, itemsize = layout.memory, spec.shape, layout.itemsize
            span = None
            if memory.space == "cpu" and layout.strides == spec.strides and memory.read is None:
                steps = byte_strides_of(spec.library, spec.strides, itemsize)
                span = _LiveSpan(*extent_of(shape, steps, itemsize), is_dense(shape, steps, itemsize))
            self._spans[key] = span
        return self._spans[key]

    def _list_written(self, storage: int, written: dict[str, list[object]]) -> None:
        """Add the live tensors of a storage to the lists of their libraries."""
        assert self._match is not None
        for index in self._users[storage]:
            items = written.setdefault(self._builder.tensors[index].library, [])
            items.extend([target.item for target in self._match.targets[index]])

    def _copy_from_buffer(self, storage: int) -> None:
        memory = self._buffers.pop(storage)
        builder, match = self._builder, self._match
        final = set(self._users[storage])
        if match is not None:
            for index in self._users[storage]:
                targets = match.targets.get(index, [])
                if targets:
                    spec = builder.tensors[index]
                    adapter = builder.adapters[spec.library]
                    source = adapter.build(spec, adapter.adopt(memory, None))
                    for target in targets:
                        adapter.copy_into(target.item, source)
            final &= match.created
        if not final:
            return
        builder.memories[storage] = memory
        libraries = {builder.tensors[index].library for index in final}
        if all(builder.devices[library] is not None for library in libraries):
            for library in libraries:
                builder.adopt(storage, library)
            del builder.memories[storage]


def _covers(ranges: list[tuple[int, int]], nbytes: int) -> bool:
    end = 0
    for lo, hi in sorted(ranges):
        if lo > end:
            return False
        end = max(end, hi)
    return end == nbytes
