"""Tell from paths and shapes what each tensor of a state is: a weight, a moment of Adam, or something to leave exact.

Pure: no bytes are read. Moments are told by the names that optimizers give them, entry by entry, so that a first
moment is always that of its second; which weight they belong to is told by name, or by the order of the parameters.

Invariants:
- Nothing is taken for a moment unless its entry holds what Adam keeps, and nothing else: moments of other optimizers
  have other rules, and stay exact.
- Nothing is taken for a weight unless a moment belongs to it, or what holds it is said to be a model: by its key, by
  torch, or because the whole state is one. Inside an optimizer nothing is.
- A wrong pair of a weight and its moments changes how they are told of, never what they decode to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    items_of,
    parts_of,
)
from ckstore.state.standard_types import COUNT, COUNT_MAX
from ckstore.state.values import decode_plain

Role = Literal["weight", "first", "second"]

FLOAT_NAMES: Mapping[str, Literal["float32", "bfloat16", "float16"]] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "<f4": "float32",
    "<f2": "float16",
}
"""Element types that can be quantized, by the names that libraries give them."""

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_BESIDE = {"step", "mu_product", "max_exp_avg_sq"}
"""What Adam and its near kin keep beside their two moments; these stay exact."""

_OPTIMIZER_KEYS = {"state", "param_groups"}
_OPTIMIZER_WORD = re.compile(
    r"(?i)(\w*[_-])?opt(im(i[sz]er)?s?)?([_-]?states?|[_-]\w*)?|exp_avg\w*|momentum(_buffer)?s?|moments?|mu|nu"
    r"|(first|second)_moments?|square_avg|grads?|gradients?"
)
_GRADIENT_WORD = re.compile(r"(?i)(\w*[_-])?grad(s|ients?)?([_-]\w+)?")
"""The same, unless it stands in a model, where layers have such names, too."""

_TOP_WORD = re.compile(
    r"(?i)[mv]|mu|nu|adam\w*|adagrad|adafactor|came|galore|kfac|lamb|lars|lion|muon|rmsprop|sgdm?|shampoo|soap|sophia"
    r"|ema_sq"
)
"""Names of a whole optimizer, or of its parts, where they stand at the top of a state."""

_MODEL_WORD = re.compile(
    r"(?i)((\w+[_-])?(model|module|net|network|weight|param|parameter|average|teacher|student|generator|discriminator"
    r"|encoder|decoder|backbone|actor|critic|unet|vae)s?"
    r"|(\w+[_-])?(state[_-]?dict|ema|swa|averaged|shadow))([_-](\d+|ema|swa|state([_-]?dict)?|weights|param(eter)?s))*"
)
"""Keys below which everything is a weight."""

_MODEL_TOP_WORD = re.compile(r"(?i)w")
_WEIGHT_WORD = re.compile(r"(?i)(\w+_)?weights?(_(ih|hh)_l\d+(_reverse)?|_[vg]|_orig)?|w|kernel|embeddings?")
"""What weights are called where the state itself is a model's."""

_APART_WORD = re.compile(
    r"(?i)(\w+_)?(rngs?|random(_states?)?|schedulers?|samplers?|(data)?loaders?|datasets?|scalers?|caches?|batch(es)?"
    r"|replay(_buffer)?|data)"
)
"""Keys at the top of a state below which nothing is a weight."""

_TOP_DEPTH = 2


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """What the next step of Adam depends on, as far as the state says it.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        step: Steps made, if it is a plain value.
        step_tensor: Index of the tensor that holds it otherwise; None: it is not known.
    """

    beta1: float
    beta2: float
    step: float | None = None
    step_tensor: int | None = None


@dataclass(slots=True)
class Pairing:
    """What the tensors of a state are; all numbers are indices of tensors.

    Args:
        roles: What each tensor was taken for; others are left exact.
        second_of: The second moment of each first moment.
        weight_of: The weight of a moment, where it was found.
        constants: What the optimizer says of each second moment.
        paths: The first path of every tensor of the state.
        other_paths: Its other paths, where it has several.
        inside: Tensors of optimizers: weights only if they are masters.
        unknown: Matrices of which nothing says what they are: exact, unless a rule names them.
    """

    roles: dict[int, Role] = field(default_factory=dict)
    second_of: dict[int, int] = field(default_factory=dict)
    weight_of: dict[int, int] = field(default_factory=dict)
    constants: dict[int, AdamConstants] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)
    other_paths: dict[int, list[Path]] = field(default_factory=dict)
    inside: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Moments:
    """The two moments of one parameter, as they stand in an optimizer's state."""

    key: Key
    first: int
    second: int


def pair(tree: Node, tensors: Sequence[TensorSpec]) -> Pairing:
    """Tell what every tensor of a state is.

    Args:
        tree: The state.
        tensors: What its tensor nodes count in.
    """
    found = Pairing()
    optimizers: list[DictNode] = []
    apart: set[int] = set()
    declared: set[int] = set()
    for path, node, place in _walk(tree, (), _Place()):
        if isinstance(node, DictNode):
            optimizers.append(node)
            continue
        assert isinstance(node, TensorNode)
        if found.paths.setdefault(node.tensor, path) != path:
            found.other_paths.setdefault(node.tensor, []).append(path)
        for holds, group in ((place.is_inside, found.inside), (place.is_apart, apart), (place.is_model, declared)):
            if holds:
                group.add(node.tensor)
    # A single tensor with an optimizer's name is none.
    if not any(len(found.paths[index]) > 1 for index in found.inside):
        declared.update(index for index, path in found.paths.items() if _is_named_weight(path))
    for index in found.paths:
        if index not in found.inside and index not in apart and _is_matrix(tensors[index]):
            if index in declared:
                found.roles[index] = "weight"
            else:
                found.unknown.add(index)
    taken: set[int] = set()
    alone: list[_Moments] = []
    for optimizer in optimizers:
        alone += _pair_optimizer(optimizer, tensors, found, taken)
    _find_unknown_weights(alone, tensors, found)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """What the keys that lead to a place say of it: of an optimizer, no part of the training, of a model."""

    is_inside: bool = False
    is_apart: bool = False
    is_model: bool = False

    def below(self, key: Key, depth: int, *, is_leaf: bool) -> _Place:
        """Return the same of what stands under a key."""
        # A flat state has the words of all its levels in one key; the last one is the tensor's own.
        words = str(key).split(".") if not depth else [str(key)]
        holders = words[:-1] if is_leaf else words
        is_inside = self.is_inside or any(_OPTIMIZER_WORD.fullmatch(word) for word in words)
        is_inside = is_inside or (not depth and _TOP_WORD.fullmatch(words[0]) is not None)
        is_inside = is_inside or (not self.is_model and _GRADIENT_WORD.fullmatch(words[0]) is not None)
        is_apart = self.is_apart or (depth < _TOP_DEPTH and _APART_WORD.fullmatch(str(key)) is not None)
        is_model = self.is_model or any(_MODEL_WORD.fullmatch(word) for word in holders)
        is_model = is_model or (not depth and not is_leaf and _MODEL_TOP_WORD.fullmatch(words[0]) is not None)
        return _Place(is_inside, is_apart, is_model)


def _walk(node: Node, path: Path, place: _Place) -> Iterator[tuple[Path, Node, _Place]]:
    """Yield every tensor, and every optimizer before the tensors in it."""
    if isinstance(node, TensorNode):
        yield path, node, place
    elif isinstance(node, DictNode):
        if is_optimizer(node):
            place = replace(place, is_inside=True)
            yield path, node, place
        if node.metadata is not None:
            # Only a module of torch makes such a dict.
            place = replace(place, is_model=True)
        for key, child in items_of(node):
            below = place.below(key, len(path), is_leaf=isinstance(child, TensorNode))
            yield from _walk(child, (*path, key), below)
    elif isinstance(node, ListNode | TupleNode):
        for index, child in enumerate(node.children):
            yield from _walk(child, (*path, index), place)
    elif not isinstance(node, ValueNode):
        # What a converter made is its own affair.
        yield from _walk(node.child, path, replace(place, is_apart=True))


def _is_named_weight(path: Path) -> bool:
    """Whether a tensor at the top of a state without an optimizer has the name of a weight."""
    return len(path) == 1 and _WEIGHT_WORD.fullmatch(str(path[0]).rpartition(".")[2]) is not None


def is_optimizer(node: Node) -> bool:
    """Whether a node looks like the state_dict of an optimizer of torch."""
    if not isinstance(node, DictNode) or not set(node.keys) >= _OPTIMIZER_KEYS:
        return False
    state, groups = _child(node, "state"), _child(node, "param_groups")
    return isinstance(state, DictNode) and isinstance(groups, ListNode | TupleNode)


def _pair_optimizer(node: DictNode, tensors: Sequence[TensorSpec], found: Pairing, taken: set[int]) -> list[_Moments]:
    """Note the moments of an optimizer and their weights; return those for which none was found."""
    state = _child(node, "state")
    assert isinstance(state, DictNode)
    entries = {(type(key), key): entry for key, entry in items_of(state)}
    moments = {name: each for name, entry in entries.items() if (each := _moments_of(name[1], entry, tensors))}
    for each in moments.values():
        found.roles[each.first], found.roles[each.second] = "first", "second"
        found.second_of[each.first] = each.second
    groups = _child(node, "param_groups")
    assert isinstance(groups, ListNode | TupleNode)
    for group in groups.children:
        if isinstance(group, DictNode):
            members = [moments[name] for key in _params_of(group) if (name := (type(key), key)) in moments]
            _note_constants(group, entries, members, found)
            _find_weights(members, tensors, found, taken)
    return [each for each in moments.values() if each.first not in found.weight_of]


def _moments_of(key: Key, entry: Node, tensors: Sequence[TensorSpec]) -> _Moments | None:
    """Return the moments of an entry that holds what Adam keeps and nothing else."""
    if not isinstance(entry, DictNode) or not {_FIRST, _SECOND} <= set(entry.keys) <= {_FIRST, _SECOND, *_BESIDE}:
        return None
    first, second = _child(entry, _FIRST), _child(entry, _SECOND)
    if not isinstance(first, TensorNode) or not isinstance(second, TensorNode) or first == second:
        return None
    one, other = tensors[first.tensor], tensors[second.tensor]
    is_alike = (one.library, one.dtype, one.shape, one.strides) == (
        other.library,
        other.dtype,
        other.shape,
        other.strides,
    )
    return _Moments(key, first.tensor, second.tensor) if is_alike and one.dtype in FLOAT_NAMES else None


def _note_constants(
    group: DictNode, entries: Mapping[tuple[type, Key], Node], moments: Sequence[_Moments], found: Pairing
) -> None:
    betas = _child(group, "betas")
    numbers = [_number(child) for child in betas.children] if isinstance(betas, ListNode | TupleNode) else []
    if len(numbers) != 2:
        return
    beta1, beta2 = numbers
    if beta1 is None or beta2 is None or not (0 <= beta1 < 1 and 0 < beta2 < 1 and beta1 * beta1 < beta2):
        return
    for each in moments:
        step = _child(entries[type(each.key), each.key], "step")
        tensor = step.tensor if isinstance(step, TensorNode) else None
        value = None if step is None or tensor is not None else _number(step)
        found.constants[each.second] = AdamConstants(beta1, beta2, value, tensor)


def _find_weights(moments: Sequence[_Moments], tensors: Sequence[TensorSpec], found: Pairing, taken: set[int]) -> None:
    """Find the weight of each parameter of a group: by its name, else the next one of its shape, in order."""
    shown = {index: _shown(found.paths[index]) for index, role in found.roles.items() if role == "weight"}
    by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for position, index in enumerate(shown):
        by_shape.setdefault(tensors[index].shape, []).append((position, index))
    begin = 0
    for each in moments:
        candidates = by_shape.get(tensors[each.first].shape, [])
        free = [(position, index) for position, index in candidates if index not in taken]
        if isinstance(each.key, str):
            named = [pair for pair in free if f".{shown[pair[1]]}".endswith(f".{each.key}")]
            # The shortest path is the model's own; longer ones are copies such as averages.
            chosen = min(named, key=lambda pair: len(found.paths[pair[1]]), default=None)
        else:
            chosen = next((pair for pair in free if pair[0] >= begin), None)
            begin = begin if chosen is None else chosen[0] + 1
        if chosen is not None:
            taken.add(chosen[1])
            found.weight_of[each.first] = found.weight_of[each.second] = chosen[1]


def _find_unknown_weights(moments: Sequence[_Moments], tensors: Sequence[TensorSpec], found: Pairing) -> None:
    """Take what moments belong to for their weights although no key says so, where there is no doubt.

    A name must be that of one tensor of the shape; without names, there must be as many tensors of it as moments.
    """
    free: dict[tuple[int, ...], list[int]] = {}
    for index in found.paths:
        if index in found.unknown:
            free.setdefault(tensors[index].shape, []).append(index)
    by_shape: dict[tuple[int, ...], list[_Moments]] = {}
    for each in moments:
        if tensors[each.first].shape in free:
            by_shape.setdefault(tensors[each.first].shape, []).append(each)
    for shape, members in by_shape.items():
        numbered = [each for each in members if not isinstance(each.key, str)]
        chosen = (
            list(zip(numbered, free[shape], strict=True)) if len(members) == len(free[shape]) == len(numbered) else []
        )
        for each in members:
            named = [index for index in free[shape] if f".{_shown(found.paths[index])}".endswith(f".{each.key}")]
            if isinstance(each.key, str) and len(named) == 1:
                chosen.append((each, named[0]))
        for each, index in chosen:
            found.unknown.discard(index)
            found.roles[index] = "weight"
            found.weight_of[each.first] = found.weight_of[each.second] = index


def _shown(path: Path) -> str:
    return ".".join(map(str, path))


def _params_of(group: DictNode) -> list[Key]:
    params = _child(group, "params")
    if isinstance(params, ConvertedNode) and params.name.startswith(COUNT):
        ends = [child.value for child in parts_of(params.child) if isinstance(child, ValueNode)]
        begin, end = ends if len(ends) == 2 else (None, None)
        # What was read from disk may be anything.
        is_count = isinstance(begin, int) and isinstance(end, int) and end - begin <= COUNT_MAX
        return list(range(begin, end)) if is_count else []  # type: ignore[arg-type]
    children = params.children if isinstance(params, ListNode | TupleNode) else ()
    return [
        child.value
        for child in children
        if isinstance(child, ValueNode) and isinstance(child.value, str | int) and child.type in ("int", "str")
    ]


def _is_matrix(spec: TensorSpec) -> bool:
    return spec.dtype in FLOAT_NAMES and len(spec.shape) >= 2


def _child(node: Node | None, key: Key) -> Node | None:
    if not isinstance(node, DictNode):
        return None
    # True == 1 to Python, and keys are typed.
    return next((child for own, child in items_of(node) if type(own) is type(key) and own == key), None)


def _number(node: Node) -> float | None:
    if not isinstance(node, ValueNode) or node.type not in ("int", "float"):
        return None
    value = decode_plain(node)
    return float(value) if isinstance(value, int | float) else None
