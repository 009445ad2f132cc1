"""Nested state into a tree, tensors and the storages they view, without copying a byte of host memory.

Invariants:
- Every byte range that two leaves share is in one storage, so it is stored once and shared again when restored.
- Storages come in the order of their first leaf, so that neighbours in the state are neighbours on disk.
- Captured memory is read later: whoever captures must not change it until it was read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckstore.errors import UsageError
from ckstore.leaves import BytesAdapter, NumpyAdapter
from ckstore.memory_spans import MemorySpan
from ckstore.tensor import HostStorage, LeafAdapter, TensorLeaf, TensorSpec
from ckstore.tree import (
    DEPTH_MAX,
    FACTORIES,
    KEY_INT_MAX,
    KEY_INT_MIN,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    place_of,
)
from ckstore.values import LONG_TEXT, converter_for, encode_plain, leaf_type_error

LONG_NBYTES_MIN = 64 << 10
"""Byte strings and text from this length on are stored as chunks, not in the tree."""

GAP_NBYTES_MAX = 64 << 10
"""Leaves of one allocation with a wider gap between them are stored apart."""

_WASTE_NBYTES_MIN = 16 << 20
KINDS: Mapping[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
"""The types of mappings that are stored, exactly these, and their names in the tree."""

FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


@dataclass(frozen=True, slots=True)
class Captured:
    """A state, taken apart.

    Args:
        tree: The state without the tensors' bytes.
        paths: The first path of each tensor.
        tensors: What the tree's tensor nodes count in; never changed. Two captures that have this same list differ in
            nothing of their storages but where they lie.
        storages: What the tensors' ``storage`` counts in.
        warnings: What the user should know, in whole sentences.
    """

    tree: Node
    paths: list[Path]
    tensors: list[TensorSpec]
    storages: Sequence[HostStorage]
    warnings: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages together."""
        return sum(storage.nbytes for storage in self.storages)


class Asked:
    """What objects have answered when they were asked for their state, to be told again to a second walk.

    Asking may take long, or need other processes: a walk that is given up must not make it happen twice.
    """

    def __init__(self) -> None:
        self._answers: deque[tuple[object, object]] = deque()

    def ask(self, item: object, question: Callable[[Any], object]) -> object:
        """Ask an object, and keep the answer."""
        answer = question(item)
        self._answers.append((item, answer))
        return answer

    def ask_or_recall(self, item: object, question: Callable[[Any], object]) -> object:
        """Return what was answered, in the order of asking, or ask."""
        if self._answers and self._answers[0][0] is item:
            return self._answers.popleft()[1]
        return question(item)


def capture(state: object, adapters: Sequence[LeafAdapter] = ()) -> Captured:
    """Take a state apart.

    Args:
        state: Nested dicts, lists and tuples of tensors, arrays and plain values, or of objects with
            ``state_dict`` and ``load_state_dict``.
        adapters: Libraries of tensors beyond numpy.

    Raises:
        LeafTypeError: A leaf cannot be stored; the error names its path.
        UsageError: A container holds itself, is nested too deep, or has a key that is neither str nor int.
    """
    return Walk((NumpyAdapter(), *adapters), Asked()).captured(state)


class Walk:
    """One walk over a state; collects its tensors.

    Args:
        adapters: All libraries of tensors.
        asked: What objects have answered to an earlier walk.
    """

    def __init__(self, adapters: Sequence[LeafAdapter], asked: Asked) -> None:
        self.adapters = adapters
        self._asked = asked
        self.long_bytes = BytesAdapter()
        self.items: list[object] = []
        self.leaves: list[TensorLeaf] = []
        self.paths: list[Path] = []
        self.warnings: list[str] = []
        # An id means nothing once its object is gone: ``items`` keeps them.
        self._seen: dict[int, int] = {}
        self._open: set[int] = set()

    def captured(self, state: object) -> Captured:
        """Return a state, taken apart."""
        tree = self.node_of(state, ())
        tensors, storages = _share(self.leaves)
        sparse = _sparse_views(self, tensors, storages)
        return Captured(tree, self.paths, tensors, storages, [*self.warnings, *sparse])

    def node_of(self, item: object, path: Path) -> Node:
        """Return the node of a part of the state."""
        plain = encode_plain(item)
        if plain is not None:
            return self._plain(item, plain, path)
        kind = type(item)
        if kind in KINDS:
            return self._within(item, path, self._mapping)
        if kind is list:
            return self._within(item, path, lambda items, here: ListNode(self._sequence(items, here)))
        if kind is tuple:
            return self._within(item, path, lambda items, here: TupleNode(self._sequence(items, here)))
        converter = converter_for(kind)
        if converter is not None:
            name, to_state = converter.name, converter.to_state
            return self._within(
                item,
                path,
                lambda whole, here: ConvertedNode(name, self.node_of(self._asked.ask_or_recall(whole, to_state), here)),
            )
        leaf = self._library_leaf(item, path)
        if leaf is not None:
            return leaf
        if has_state_dict(item):
            return self._within(
                item, path, lambda whole, here: self.node_of(self._asked.ask_or_recall(whole, state_dict_of), here)
            )
        raise leaf_type_error(item, path)

    def _plain(self, item: object, plain: ValueNode, path: Path) -> Node:
        if isinstance(item, bytes) and len(item) >= LONG_NBYTES_MIN:
            leaf = self.long_bytes.describe(item, path)
            assert leaf is not None
            return self._tensor(item, leaf, path)
        if isinstance(item, str) and len(item) >= LONG_NBYTES_MIN:
            text = item.encode("utf-8", "surrogatepass")
            leaf = self.long_bytes.describe(text, path)
            assert leaf is not None
            return ConvertedNode(LONG_TEXT, self._tensor(text, leaf, path))
        return plain

    def _library_leaf(self, item: object, path: Path) -> Node | None:
        for adapter in self.adapters:
            leaf = adapter.describe(item, path)
            if leaf is not None:
                return self._tensor(item, leaf, path)
            value = adapter.encode_value(item, path)
            if value is not None:
                return ValueNode(*value)
        return None

    def _tensor(self, item: object, leaf: TensorLeaf, path: Path) -> TensorNode:
        number = self._seen.get(id(item))
        if number is None:
            number = self._seen[id(item)] = len(self.leaves)
            self.items.append(item)
            self.leaves.append(leaf)
            self.paths.append(path)
        return TensorNode(number)

    def _within(self, item: Any, path: Path, make: Callable[[Any, Path], Node]) -> Node:
        if id(item) in self._open:
            raise UsageError("the state holds itself", where=place_of(path), todo="store each part once", path=path)
        if len(self._open) >= DEPTH_MAX:
            raise UsageError(f"the state is nested deeper than {DEPTH_MAX} levels", where=place_of(path), path=path)
        self._open.add(id(item))
        node = make(item, path)
        self._open.discard(id(item))
        return node

    def _sequence(self, items: Sequence[object], path: Path) -> tuple[Node, ...]:
        return tuple(self.node_of(item, (*path, index)) for index, item in enumerate(items))

    def _mapping(self, items: Mapping[Any, object], path: Path) -> DictNode:
        kind = KINDS[type(items)]
        keys = tuple(_checked_key(key, path) for key in items)
        children = tuple(self.node_of(items[key], (*path, key)) for key in keys)
        attributes = dict(getattr(items, "__dict__", {}))
        metadata = None
        if kind == "OrderedDict" and "_metadata" in attributes:
            metadata = self.node_of(attributes.pop("_metadata"), (*path, "_metadata"))
        if attributes:
            lost = ", ".join(sorted(attributes))
            self.warnings.append(f"Attributes of the {kind} at {place_of(path)} are not stored: {lost}.")
        return DictNode(kind, keys, children, metadata, self._factory_name(items, path))

    def _factory_name(self, items: Mapping[Any, object], path: Path) -> str | None:
        if not isinstance(items, defaultdict):
            return None
        try:
            return FACTORY_NAMES[items.default_factory]
        except (KeyError, TypeError):
            raise leaf_type_error(
                items, path, f"its default factory {items.default_factory!r} is none of {', '.join(FACTORIES)}"
            ) from None


def _sparse_views(walk: Walk, tensors: list[TensorSpec], storages: list[HostStorage]) -> Iterator[str]:
    users: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if storages[tensor.storage].nbytes >= _WASTE_NBYTES_MIN:
            users.setdefault(tensor.storage, []).append(number)
    for index, numbers in users.items():
        stored = storages[index].nbytes
        used = sum(walk.leaves[number].element_count * walk.leaves[number].itemsize for number in numbers)
        if stored > 2 * used:
            yield (
                f"{place_of(walk.paths[numbers[0]])} is a sparse view: {stored} bytes are stored for {used}. "
                "Commit a contiguous copy of it to store less."
            )


def has_state_dict(item: object) -> bool:
    """Say whether an object gives and takes its state by ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(item, type)
        and callable(getattr(item, "state_dict", None))
        and callable(getattr(item, "load_state_dict", None))
    )


def state_dict_of(item: Any) -> object:
    """Ask an object for its state."""
    return item.state_dict()


def _checked_key(key: object, path: Path) -> Key:
    if type(key) is str:
        try:
            key.encode()
        except UnicodeEncodeError:
            raise UsageError("a key is not valid Unicode text", where=place_of(path), path=path) from None
        return key
    if type(key) is int and KEY_INT_MIN <= key <= KEY_INT_MAX:
        return key
    raise UsageError(
        f"the key {key!r} is neither a str nor an int of 64 bits",
        where=place_of(path),
        todo="use str or int keys",
        path=path,
    )


def _share(leaves: list[TensorLeaf]) -> tuple[list[TensorSpec], list[HostStorage]]:
    """Give every leaf its storage: one for leaves that lie close together in one allocation."""
    clusters: list[list[int]] = [[number] for number, leaf in enumerate(leaves) if leaf.memory.nbytes == 0]
    for allocation in allocations_of(leaves):
        clusters.extend(_clusters(leaves, allocation))
    clusters.sort(key=min)
    tensors: dict[int, TensorSpec] = {}
    storages: list[HostStorage] = []
    for cluster in clusters:
        span = _span_of([leaves[number] for number in cluster])
        for number in cluster:
            tensors[number] = _spec_of(leaves[number], len(storages), span.start)
        storages.append(span)
    return [tensors[number] for number in range(len(leaves))], storages


def allocations_of(leaves: Sequence[TensorLeaf]) -> list[list[int]]:
    """Group leaves whose allocations overlap: one library's memory may be another one's view."""
    order = [number for number, leaf in enumerate(leaves) if leaf.memory.nbytes]
    order.sort(key=lambda number: (leaves[number].memory.space, leaves[number].memory.owner_start))
    groups: list[list[int]] = []
    space, end = "", 0
    for number in order:
        memory = leaves[number].memory
        if groups and memory.space == space and memory.owner_start < end:
            groups[-1].append(number)
        else:
            groups.append([number])
            end = 0
        space, end = memory.space, max(end, memory.owner_start + memory.owner_nbytes)
    return groups


def _clusters(leaves: list[TensorLeaf], allocation: list[int]) -> list[list[int]]:
    if len(allocation) == 1:
        return [allocation]
    clusters: list[list[int]] = []
    end = 0
    for number in sorted(allocation, key=lambda number: leaves[number].memory.start):
        memory = leaves[number].memory
        if clusters and memory.start <= end + GAP_NBYTES_MAX:
            clusters[-1].append(number)
        else:
            clusters.append([number])
            end = 0
        end = max(end, memory.start + memory.nbytes)
    return clusters


def _span_of(leaves: list[TensorLeaf]) -> MemorySpan:
    if len(leaves) == 1 and leaves[0].origin == leaves[0].memory.start:
        # Nearly every tensor of a training run, of which there are hundreds in each commit.
        leaf, memory = leaves[0], leaves[0].memory
        return MemorySpan(memory.start, memory.nbytes, leaf.element_width, leaf.is_float, [memory.keep], memory.read)
    start = min(leaf.memory.start for leaf in leaves)
    end = max(leaf.memory.start + leaf.memory.nbytes for leaf in leaves)
    first = min(leaves, key=lambda leaf: leaf.memory.start)
    if any(leaf.library == "torch" and leaf.itemsize and (leaf.origin - start) % leaf.itemsize for leaf in leaves):
        # torch counts offsets in elements; from the allocation's start they are whole numbers.
        start -= (start - first.memory.owner_start) % 16
    largest = max(leaves, key=lambda leaf: leaf.memory.nbytes)
    keep = [leaf.memory.keep for leaf in leaves]
    return MemorySpan(start, end - start, largest.element_width, largest.is_float, keep, first.memory.read)


def _spec_of(leaf: TensorLeaf, storage: int, start: int) -> TensorSpec:
    offset = leaf.origin - start if leaf.memory.nbytes else 0
    return TensorSpec(
        leaf.library, leaf.dtype, leaf.shape, leaf.strides, storage, offset, leaf.is_parameter, leaf.requires_grad
    )
