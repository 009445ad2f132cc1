"""Capture a nested state as a tree, its tensors and the storages that they view, without copying host memory.

Invariants:
- A byte range that two leaves share is in one storage. So it is stored once, and shared again after a restore.
- Storages are in the order of their first leaf, so that neighbours in the state are neighbours on disk.
- Captured memory is read later. The caller must not change it before it has been read.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckstore.concurrency import collector_paused
from ckstore.errors import CkstoreError, UsageError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
    DEPTH_MAX,
    FACTORIES,
    KEY_INT_MAX,
    KEY_INT_MIN,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    Path,
    TensorNode,
    TupleNode,
    Value,
    ValueNode,
    encode_tree,
    place_of,
)
from ckstore.state.markers import DECLARED, OPEN_WITH_RANKS, PerRank, Replicated
from ckstore.state.memory import MemorySpan, Spans
from ckstore.state.named_types import has_class
from ckstore.state.numpy_adapter import BytesAdapter, NumpyAdapter
from ckstore.state.omitted_content import OmittedContent
from ckstore.state.standard_types import PLAIN, PLAIN_MIN, Conversion, convert_standard, pack_numbers
from ckstore.state.tensors import HostStorage, LeafAdapter, TensorLeaf
from ckstore.state.values import LONG_TEXT, converter_for, encode_plain, leaf_type_error

Result = TypeVar("Result")

LONG_NBYTES_MIN = 64 << 10
"""Byte strings and text of at least this length are stored in chunks instead of the tree."""

GAP_NBYTES_MAX = 64 << 10
"""Leaves of one allocation with a wider gap between them get separate storages."""

_WASTE_NBYTES_MIN = 16 << 20
KINDS: Mapping[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", defaultdict: "defaultdict"}
"""The exact types of mappings that can be stored, and their names in the tree."""

OPTIMIZER_KEYS = {"state", "param_groups"}
"""Keys in the state of every torch optimizer."""

FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class Structure:
    """The structure and the shapes of a state, as the owner of everything that is derived from them alone.

    Captures of one structure share it; see ``CaptureCache``. So such results are computed for the first commit only: a
    state may have ten thousand tensors. It keeps neither tensors nor values alive.
    """

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.number = next(self._numbers)
        """Its name in messages to the saver process; unique in this process."""
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return the result of ``make``, which depends on the structure and on the key alone."""
        try:
            found: Result = self._results[key]
        except KeyError:
            found = self._results[key] = make()
        return found


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured state.

    Args:
        tree: The state without the tensors' bytes.
        paths: The first path of each tensor.
        tensors: The tensors that the tree's tensor nodes index; never changed. The storages of two captures with the
            same list object differ in their addresses only.
        storages: The storages that ``tensors`` index.
        warnings: Warnings for the user, in whole sentences.
        structure: Its structure. Captures that differ in values and addresses only may share it.
        starts: Where each storage begins in the storage of the checkpoint, for the shards of one rank; empty: at 0.
    """

    tree: Node
    paths: list[Path]
    tensors: list[TensorSpec]
    storages: Sequence[HostStorage]
    warnings: list[str]
    structure: Structure = field(default_factory=Structure, compare=False, repr=False)
    starts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes for storage in self.storages)


class StateDictCache:
    """Results of ``state_dict`` and of converters, recorded by one walk for reuse by a second.

    Such a call may be slow or need other processes. It must not happen twice if the first walk is abandoned.
    """

    def __init__(self) -> None:
        self._results: deque[tuple[object, object]] = deque()

    def call(self, item: object, function: Callable[[Any], object]) -> object:
        """Call the function, and record its result."""
        result = function(item)
        self._results.append((item, result))
        return result

    def recall_or_call(self, item: object, function: Callable[[Any], object]) -> object:
        """Return the next recorded result if it belongs to this object, else call the function."""
        if self._results and self._results[0][0] is item:
            return self._results.popleft()[1]
        return function(item)


def capture(state: object, adapters: Sequence[LeafAdapter] = ()) -> Captured:
    """Capture a state.

    Args:
        state: Nested dicts, lists and tuples of tensors, arrays, plain values and objects with ``state_dict`` and
            ``load_state_dict``.
        adapters: Adapters of tensor libraries other than numpy.

    Raises:
        LeafTypeError: A leaf cannot be stored; the error names its path.
        UsageError: A container contains itself, is nested too deeply, or has a key that cannot be stored.
    """
    return StateWalker((NumpyAdapter(), *adapters), StateDictCache()).captured(state)


class StateWalker:
    """One walk over a state; collects its tensors.

    Args:
        adapters: Adapters of all tensor libraries.
        results: Results of calls that an earlier walk made.
        is_plain: Refuse tensors, converters and objects with ``state_dict``.
    """

    def __init__(self, adapters: Sequence[LeafAdapter], results: StateDictCache, *, is_plain: bool = False) -> None:
        self.adapters = adapters
        self._results = results
        self._is_plain = is_plain
        self.long_bytes = BytesAdapter()
        self.items: list[object] = []
        self.leaves: list[TensorLeaf] = []
        self.paths: list[Path] = []
        self.warnings: list[str] = []
        self.omitted = OmittedContent()
        # ``items`` keeps the objects alive: an id is only unique while its object is alive.
        self._number_of: dict[int, int] = {}
        self._ancestors: set[int] = set()
        self._value_count = 0
        self._tensor_node_count = 0
        self._is_in_optimizer = False

    def captured(self, state: object) -> Captured:
        """Capture a state."""
        tree = self.node_of(state, ())
        with collector_paused():
            tensors, spans = _share(self.leaves)
            storages = Spans.of(spans)
        self.warnings += self.omitted.sentences()
        sparse = _sparse_views(self, tensors, storages)
        return Captured(tree, self.paths, tensors, storages, [*self.warnings, *sparse])

    def node_of(self, item: object, path: Path) -> Node:
        """Return the node of a part of the state."""
        plain = encode_plain(item)
        if plain is not None:
            return self._plain(item, plain, path)
        kind = type(item)
        if kind in KINDS:
            return self._pack_if_long(path, lambda: self._descend(item, path, self._mapping))
        if kind is list:
            return self._pack_if_long(path, lambda: self._descend(item, path, self._list))
        if kind is tuple:
            return self._pack_if_long(path, lambda: self._descend(item, path, self._tuple))
        converter = converter_for(kind)
        if converter is not None and not self._is_plain:
            name, to_state = converter.name, converter.to_state
            return self._descend(
                item,
                path,
                lambda whole, here: ConvertedNode(
                    name, self.node_of(self._results.recall_or_call(whole, to_state), here)
                ),
            )
        leaf = self._library_leaf(item, path)
        if leaf is not None:
            return leaf
        if has_state_dict(item) and not self._is_plain:
            return self._descend(
                item, path, lambda whole, here: self.node_of(self._results.recall_or_call(whole, state_dict_of), here)
            )
        conversion = convert_leaf(item, path, self.adapters)
        if conversion is None:
            raise leaf_type_error(item, path)
        name, state = conversion
        if name.startswith(DECLARED):
            if self._is_plain:
                raise leaf_type_error(item, path, "it marks a part of a tensor's attributes or of a key")
            # Count a tensor, so that containers around it are not stored as bytes.
            self._tensor_node_count += 1
        elif not has_class(name, item):
            self.omitted.note_class(type(item), path)
        return self._descend(item, path, lambda _, here: ConvertedNode(name, self.node_of(state, here)))

    def _plain(self, item: object, plain: ValueNode, path: Path) -> Node:
        if isinstance(item, bytes) and len(item) >= LONG_NBYTES_MIN:
            return self._long_bytes(item, item, path)
        if isinstance(item, str) and len(item) >= LONG_NBYTES_MIN:
            text = item.encode("utf-8", "surrogatepass")
            return ConvertedNode(LONG_TEXT, self._long_bytes(text, text, path))
        self._value_count += 1
        return plain

    def _long_bytes(self, item: object, content: bytes, path: Path) -> TensorNode:
        leaf = self.long_bytes.describe(content, path)
        assert leaf is not None
        return self._tensor(item, leaf, path)

    def _list(self, items: list[object], path: Path) -> Node:
        return self._packed_numbers(items, path) or ListNode(self._sequence(items, path))

    def _tuple(self, items: tuple[object, ...], path: Path) -> Node:
        return self._packed_numbers(items, path) or TupleNode(self._sequence(items, path))

    def _packed_numbers(self, items: list[Any] | tuple[Any, ...], path: Path) -> Node | None:
        packed = None if self._is_plain else pack_numbers(items, only_counts=self._is_in_optimizer)
        return None if packed is None else ConvertedNode(packed[0], self.node_of(packed[1], path))

    def _pack_if_long(self, path: Path, make: Callable[[], Node]) -> Node:
        """Return the node of a container; a container of many plain values without tensors is stored as bytes.

        Two containers are never stored as bytes: the root, because users select by its keys, and an optimizer's state,
        because commits read from it which tensors belong together.
        """
        values, tensors = self._value_count, self._tensor_node_count
        node = make()
        is_long = self._value_count - values >= PLAIN_MIN and self._tensor_node_count == tensors
        if not is_long or not path or self._is_plain or self._is_in_optimizer:
            return node
        self._value_count = values
        content = encode_tree(node)
        return ConvertedNode(PLAIN, self._long_bytes(content, content, path))

    def _library_leaf(self, item: object, path: Path) -> Node | None:
        for adapter in self.adapters:
            leaf = adapter.describe(item, path)
            if leaf is not None:
                return self._with_attributes(self._tensor(item, leaf, path), item, path)
            value = adapter.encode_value(item, path)
            if value is not None:
                self._value_count += 1
                return checked_value(adapter, item, value, path)
        return None

    def _with_attributes(self, node: TensorNode, item: object, path: Path) -> TensorNode:
        attributes = getattr(item, "__dict__", None)
        if attributes:
            # torch sets this attribute on parameters that are shards.
            attributes = {name: value for name, value in attributes.items() if name != "_is_param"}
        return TensorNode(node.tensor, self._attributes(attributes, "tensors", path)) if attributes else node

    def _attributes(self, attributes: Mapping[str, object], owner: str, path: Path) -> DictNode | None:
        """Return the node of an object's Python attributes; omit attributes that are not plain, with a warning."""
        nodes: dict[str, Node] = {}
        for name, value in attributes.items():
            walk = StateWalker(self.adapters, StateDictCache(), is_plain=True)
            try:
                if not _is_unicode(name):
                    raise UsageError("the name of an attribute is not a valid str")
                nodes[name] = walk.node_of(value, (*path, name))
                self.omitted.add(walk.omitted)
            except CkstoreError:
                self.omitted.note_attribute(owner, str(name), path)
        return DictNode("dict", tuple(nodes), tuple(nodes.values())) if nodes else None

    def _tensor(self, item: object, leaf: TensorLeaf, path: Path) -> TensorNode:
        if self._is_plain:
            raise leaf_type_error(item, path)
        self._tensor_node_count += 1
        number = self._number_of.get(id(item))
        if number is None:
            number = self._number_of[id(item)] = len(self.leaves)
            self.items.append(item)
            self.leaves.append(leaf)
            self.paths.append(path)
        return TensorNode(number)

    def _descend(self, item: Any, path: Path, make: Callable[[Any, Path], Node]) -> Node:
        if id(item) in self._ancestors:
            raise UsageError("the state contains itself", where=place_of(path), todo="remove the cycle", path=path)
        if len(self._ancestors) >= DEPTH_MAX:
            raise UsageError(f"the state is nested deeper than {DEPTH_MAX} levels", where=place_of(path), path=path)
        self._ancestors.add(id(item))
        node = make(item, path)
        self._ancestors.discard(id(item))
        return node

    def _sequence(self, items: Sequence[object], path: Path) -> tuple[Node, ...]:
        return tuple(self.node_of(item, (*path, index)) for index, item in enumerate(items))

    def _mapping(self, items: Mapping[Any, object], path: Path) -> DictNode:
        kind = KINDS[type(items)]
        outside, is_optimizer = self._is_in_optimizer, items.keys() >= OPTIMIZER_KEYS
        self._is_in_optimizer = outside or is_optimizer
        # Count a tensor, so that containers around an optimizer's state are not stored as bytes.
        self._tensor_node_count += is_optimizer
        keys = tuple([self._key(key, path) for key in items])
        _check_distinct(keys, path)
        children = tuple([self.node_of(item, (*path, key)) for key, item in zip(keys, items.values(), strict=True)])
        raw = dict(getattr(items, "__dict__", {}))
        metadata = None
        if kind == "OrderedDict" and "_metadata" in raw:
            metadata = self.node_of(raw.pop("_metadata"), (*path, "_metadata"))
        owner = f"an {kind}" if kind == "OrderedDict" else f"a {kind}"
        attributes = self._attributes(raw, owner, path) if raw else None
        self._is_in_optimizer = outside
        return DictNode(kind, keys, children, metadata, self._factory_name(items, path), attributes)

    def _key(self, key: object, path: Path) -> Key:
        return stored_key(key, path, self.adapters, self.omitted)

    def _factory_name(self, items: Mapping[Any, object], path: Path) -> str | None:
        if not isinstance(items, defaultdict):
            return None
        try:
            return FACTORY_NAMES[items.default_factory]
        except (KeyError, TypeError):
            raise leaf_type_error(
                items,
                path,
                f"its default factory {items.default_factory!r} is not one of {', '.join(FACTORIES)}",
                "use one of these, or store a plain dict",
            ) from None


def loaded_adapters() -> list[LeafAdapter]:
    """Return an adapter for each tensor library that this process has loaded, numpy apart."""
    if "torch" not in sys.modules:
        return []
    from ckstore.state.torch_adapter import TorchAdapter

    return [TorchAdapter()]


def _sparse_views(walk: StateWalker, tensors: list[TensorSpec], storages: Sequence[HostStorage]) -> Iterator[str]:
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
    """Say whether an object has ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(item, type)
        and callable(getattr(item, "state_dict", None))
        and callable(getattr(item, "load_state_dict", None))
    )


def state_dict_of(item: Any) -> object:
    """Return the ``state_dict`` of an object."""
    return item.state_dict()


def stored_key(key: Any, path: Path, adapters: Sequence[LeafAdapter], omitted: OmittedContent | None = None) -> Key:
    """Return the stored form of a mapping's key.

    Args:
        key: The key.
        path: Path of the mapping.
        adapters: Adapters of all tensor libraries.
        omitted: Records which content of the key is not stored.

    Raises:
        UsageError: The key cannot be stored.
    """
    kind = type(key)
    if kind is int and KEY_INT_MIN <= key <= KEY_INT_MAX:
        return int(key)
    if kind is str and _is_unicode(key):
        return str(key)
    walk = StateWalker(adapters, StateDictCache(), is_plain=True)
    try:
        stored = OtherKey(walk.node_of(key, path))
    except CkstoreError:
        raise UsageError(
            f"a key of type {kind.__module__}.{kind.__qualname__} cannot be stored",
            where=place_of(path),
            todo="use keys that are plain values, tuples of these, or members of an Enum",
            path=path,
        ) from None
    if omitted is not None:
        omitted.add(walk.omitted)
    return stored


def _check_distinct(keys: Sequence[Key], path: Path) -> None:
    seen: set[Key] = set()
    for key in keys:
        if type(key) is OtherKey:
            if key in seen:
                raise UsageError(
                    f"two keys of a dict have the same stored form: {key}",
                    where=place_of(path),
                    todo="use keys with different content; two NaNs or two objects with equal fields are not different",
                    path=(*path, key),
                )
            seen.add(key)


def convert_leaf(item: object, path: Path, adapters: Sequence[LeafAdapter]) -> Conversion | None:
    """Return the conversion of a leaf that is neither tensor nor container; None: its type cannot be stored.

    Raises:
        LeafTypeError: The type can be stored, but not the content of this leaf.
    """
    try:
        for adapter in adapters:
            conversion = adapter.convert(item)
            if conversion is not None:
                return conversion
        if not isinstance(item, PerRank | Replicated):
            return convert_standard(item)
    except (ValueError, TypeError, ArithmeticError, AttributeError, CkstoreError) as problem:
        raise leaf_type_error(item, path, str(problem)[:200]) from None
    raise leaf_type_error(item, path, "it marks a part of the state of many ranks", OPEN_WITH_RANKS)


def checked_value(adapter: LeafAdapter, item: object, value: tuple[str, Value], path: Path) -> ValueNode:
    """Return the node of a library's plain value, after decoding it as a reader would.

    Raises:
        LeafTypeError: A reader would refuse the value, or restore another one.
    """
    try:
        again = adapter.encode_value(adapter.decode_value(*value), path)
        # Scalars of structured dtypes may have padding bytes, which may differ.
        is_sound = again == value or (again is not None and again[0] == value[0] and type(value[1]) is bytes)
    except CkstoreError:
        is_sound = False
    if not is_sound:
        raise leaf_type_error(item, path, "it could not be restored")
    return ValueNode(*value)


def _is_unicode(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _share(leaves: list[TensorLeaf]) -> tuple[list[TensorSpec], list[MemorySpan]]:
    """Assign leaves to storages: leaves close together in one allocation share one."""
    clusters: list[list[int]] = [[number] for number, leaf in enumerate(leaves) if leaf.memory.nbytes == 0]
    for allocation in allocations_of(leaves):
        clusters.extend(_clusters(leaves, allocation))
    clusters.sort(key=min)
    tensors: dict[int, TensorSpec] = {}
    storages: list[MemorySpan] = []
    for cluster in clusters:
        span = _span_of([leaves[number] for number in cluster])
        for number in cluster:
            tensors[number] = _spec_of(leaves[number], len(storages), span.start)
        storages.append(span)
    return [tensors[number] for number in range(len(leaves))], storages


def allocations_of(leaves: Sequence[TensorLeaf]) -> list[list[int]]:
    """Group leaves whose allocations overlap; different libraries may view the same memory."""
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
        # Fast path for nearly every tensor of a training run.
        memory = leaves[0].memory
        elements = _elements_of(leaves[0], memory.start, memory.nbytes)
        return MemorySpan(memory.start, memory.nbytes, *elements, [memory.keep], memory.read)
    start = min(leaf.memory.start for leaf in leaves)
    end = max(leaf.memory.start + leaf.memory.nbytes for leaf in leaves)
    first = min(leaves, key=lambda leaf: leaf.memory.start)
    if any(leaf.library == "torch" and leaf.itemsize and (leaf.origin - start) % leaf.itemsize for leaf in leaves):
        # torch counts offsets in elements, so start at a multiple of 16 from the start of the allocation.
        start -= (start - first.memory.owner_start) % 16
    largest = max(leaves, key=lambda leaf: leaf.memory.nbytes)
    keep = [leaf.memory.keep for leaf in leaves]
    return MemorySpan(start, end - start, *_elements_of(largest, start, end - start), keep, first.memory.read)


def _elements_of(leaf: TensorLeaf, start: int, nbytes: int) -> tuple[int, bool]:
    """Return width and is_float of a span's elements; ``(1, False)`` if the leaf's elements do not divide it."""
    width = leaf.element_width
    return (width, leaf.is_float) if nbytes % width == 0 == (leaf.origin - start) % width else (1, False)


def _spec_of(leaf: TensorLeaf, storage: int, start: int) -> TensorSpec:
    offset = leaf.origin - start if leaf.memory.nbytes else 0
    return TensorSpec(
        leaf.library, leaf.dtype, leaf.shape, leaf.strides, storage, offset, leaf.is_parameter, leaf.requires_grad
    )
