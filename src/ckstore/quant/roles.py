"""Recognize weights and Adam moments from the paths, shapes and structure of a state.

Pure: reads no tensor bytes. Moments are recognized by the names in an optimizer's state, entry by entry, so a first
moment always belongs to its second moment. Their weight is found by name, or by the order of the parameters.

Invariants:
- A tensor is a moment only if its entry contains what Adam keeps and nothing else. Moments of other optimizers follow
  other rules and stay exact.
- A tensor is a weight only if a moment belongs to it, or if its container is a model: by its key, by torch's metadata,
  or because the whole state is one. Tensors inside an optimizer are not weights.
- A wrong pair of a weight and its moments changes how well they are coded, never what they decode to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckstore.format.many_ranks import state_of
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
"""Element types that can be quantized, by their names in torch and numpy."""

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_OTHER_ADAM_KEYS = {"step", "mu_product", "max_exp_avg_sq"}
"""Other keys of Adam and its variants in an entry; these tensors stay exact."""

_OPTIMIZER_KEYS = {"state", "param_groups"}
_OPTIMIZER_WORD = re.compile(
    r"(?i)(\w*[_-])?opt(im(i[sz]er)?s?)?([_-]?states?|[_-]\w*)?|exp_avg\w*|momentum(_buffer)?s?|moments?|mu|nu"
    r"|(first|second)_moments?|square_avg|grads?|gradients?"
)
_GRADIENT_WORD = re.compile(r"(?i)(\w*[_-])?grad(s|ients?)?([_-]\w+)?")
"""The same outside models; inside a model, layers may have such names."""

_TOP_WORD = re.compile(
    r"(?i)[mv]|mu|nu|adam\w*|adagrad|adafactor|came|galore|kfac|lamb|lars|lion|muon|rmsprop|sgdm?|shampoo|soap|sophia"
    r"|ema_sq"
)
"""Names of an optimizer or its parts at the top of a state."""

_MODEL_WORD = re.compile(
    r"(?i)((\w+[_-])?(model|module|net|network|weight|param|parameter|average|teacher|student|generator|discriminator"
    r"|encoder|decoder|backbone|actor|critic|unet|vae)s?"
    r"|(\w+[_-])?(state[_-]?dict|ema|swa|averaged|shadow))([_-](\d+|ema|swa|state([_-]?dict)?|weights|param(eter)?s))*"
)
"""Keys below which everything is a weight."""

_MODEL_TOP_WORD = re.compile(r"(?i)w")
_WEIGHT_WORD = re.compile(r"(?i)(\w+_)?weights?(_(ih|hh)_l\d+(_reverse)?|_[vg]|_orig)?|w|kernel|embeddings?")
"""Names of weights if the state itself is a model's."""

_NOT_A_WEIGHT_WORD = re.compile(
    r"(?i)(\w+_)?(rngs?|random(_states?)?|schedulers?|samplers?|(data)?loaders?|datasets?|scalers?|caches?|batch(es)?"
    r"|replay(_buffer)?|data)"
)
"""Keys at the top of a state below which nothing is a weight."""

_TOP_DEPTH = 2


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """The constants that Adam's next step depends on.

    Args:
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        step: Number of steps made, if the state has it as a plain value.
        step_tensor: Index of the tensor that contains the number of steps; None if there is none.
    """

    beta1: float
    beta2: float
    step: float | None = None
    step_tensor: int | None = None


@dataclass(slots=True)
class Pairing:
    """The roles of the tensors of a state. All numbers are indices of tensors.

    Args:
        roles: The role of each recognized tensor; all others stay exact.
        second_of: The second moment of each first moment.
        weight_of: The weight of each moment, if it was found.
        constants: The optimizer's constants for each second moment.
        paths: The first path of every tensor.
        other_paths: Further paths of tensors that have several.
        inside: Tensors inside optimizers; they are weights only if they are fp32 masters.
        unknown: Matrices without a recognized role; they stay exact unless a rule names them.
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
    """The two moments of one parameter, with the parameter's key in the optimizer's state."""

    key: Key
    first: int
    second: int


def pair(tree: Node, tensors: Sequence[TensorSpec]) -> Pairing:
    """Find the role of every tensor of a state.

    Args:
        tree: The state.
        tensors: The tensors that its nodes refer to.
    """
    found = Pairing()
    optimizers: list[DictNode] = []
    not_weights: set[int] = set()
    declared: set[int] = set()
    for path, node, context in _walk(state_of(tree), (), _KeyContext()):
        if isinstance(node, DictNode):
            optimizers.append(node)
            continue
        assert isinstance(node, TensorNode)
        if found.paths.setdefault(node.tensor, path) != path:
            found.other_paths.setdefault(node.tensor, []).append(path)
        for holds, group in (
            (context.is_inside, found.inside),
            (context.is_not_weight, not_weights),
            (context.is_model, declared),
        ):
            if holds:
                group.add(node.tensor)
    # A single tensor with an optimizer's name is not an optimizer.
    if not any(len(found.paths[index]) > 1 for index in found.inside):
        declared.update(index for index, path in found.paths.items() if _is_named_weight(path))
    for index in found.paths:
        if index not in found.inside and index not in not_weights and _is_matrix(tensors[index]):
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
class _KeyContext:
    """What the keys above a node say: inside an optimizer, certainly not a weight (data, rng, ...), inside a model."""

    is_inside: bool = False
    is_not_weight: bool = False
    is_model: bool = False

    def below(self, key: Key, depth: int, *, is_leaf: bool) -> _KeyContext:
        """Return the context below a key."""
        # A flat state has the words of all its levels in one key. The last word is the tensor's own.
        words = str(key).split(".") if not depth else [str(key)]
        holders = words[:-1] if is_leaf else words
        is_inside = self.is_inside or any(_OPTIMIZER_WORD.fullmatch(word) for word in words)
        is_inside = is_inside or (not depth and _TOP_WORD.fullmatch(words[0]) is not None)
        is_inside = is_inside or (not self.is_model and _GRADIENT_WORD.fullmatch(words[0]) is not None)
        is_not_weight = self.is_not_weight or (
            depth < _TOP_DEPTH and _NOT_A_WEIGHT_WORD.fullmatch(str(key)) is not None
        )
        is_model = self.is_model or any(_MODEL_WORD.fullmatch(word) for word in holders)
        is_model = is_model or (not depth and not is_leaf and _MODEL_TOP_WORD.fullmatch(words[0]) is not None)
        return _KeyContext(is_inside, is_not_weight, is_model)


def _walk(node: Node, path: Path, context: _KeyContext) -> Iterator[tuple[Path, Node, _KeyContext]]:
    """Yield every tensor, and every optimizer before its tensors."""
    if isinstance(node, TensorNode):
        yield path, node, context
    elif isinstance(node, DictNode):
        if is_optimizer(node):
            context = replace(context, is_inside=True)
            yield path, node, context
        if node.metadata is not None:
            # Only torch.nn.Module.state_dict makes a dict with metadata.
            context = replace(context, is_model=True)
        for key, child in items_of(node):
            below = context.below(key, len(path), is_leaf=isinstance(child, TensorNode))
            yield from _walk(child, (*path, key), below)
    elif isinstance(node, ListNode | TupleNode):
        for index, child in enumerate(node.children):
            yield from _walk(child, (*path, index), context)
    elif not isinstance(node, ValueNode):
        # The contents of converted objects are not interpreted.
        yield from _walk(node.child, path, replace(context, is_not_weight=True))


def _is_named_weight(path: Path) -> bool:
    """Return True if a tensor at the top of a state without an optimizer has the name of a weight."""
    return len(path) == 1 and _WEIGHT_WORD.fullmatch(str(path[0]).rpartition(".")[2]) is not None


def is_optimizer(node: Node) -> bool:
    """Return True if a node looks like the state_dict of a torch optimizer."""
    if not isinstance(node, DictNode) or not set(node.keys) >= _OPTIMIZER_KEYS:
        return False
    state, groups = _child(node, "state"), _child(node, "param_groups")
    return isinstance(state, DictNode) and isinstance(groups, ListNode | TupleNode)


def _pair_optimizer(node: DictNode, tensors: Sequence[TensorSpec], found: Pairing, taken: set[int]) -> list[_Moments]:
    """Record the moments of an optimizer and their weights; return the moments without a weight."""
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
    """Return the moments of an entry that contains what Adam keeps and nothing else; else None."""
    if not isinstance(entry, DictNode) or not {_FIRST, _SECOND} <= set(entry.keys) <= {
        _FIRST,
        _SECOND,
        *_OTHER_ADAM_KEYS,
    }:
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
    """Find the weight of each parameter of a group: by name, or in order the next weight of the same shape."""
    dotted = {index: _dotted(found.paths[index]) for index, role in found.roles.items() if role == "weight"}
    by_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for position, index in enumerate(dotted):
        by_shape.setdefault(tensors[index].shape, []).append((position, index))
    begin = 0
    for each in moments:
        candidates = by_shape.get(tensors[each.first].shape, [])
        free = [(position, index) for position, index in candidates if index not in taken]
        if isinstance(each.key, str):
            named = [pair for pair in free if f".{dotted[pair[1]]}".endswith(f".{each.key}")]
            # The shortest path is the model's own; longer ones are copies such as averages.
            chosen = min(named, key=lambda pair: len(found.paths[pair[1]]), default=None)
        else:
            chosen = next((pair for pair in free if pair[0] >= begin), None)
            begin = begin if chosen is None else chosen[0] + 1
        if chosen is not None:
            taken.add(chosen[1])
            found.weight_of[each.first] = found.weight_of[each.second] = chosen[1]


def _find_unknown_weights(moments: Sequence[_Moments], tensors: Sequence[TensorSpec], found: Pairing) -> None:
    """Find weights that no key marks as such, if they are unambiguous.

    A named parameter must match exactly one unknown tensor of its shape. For numbered parameters, there must be as many
    unknown tensors of the shape as parameters.
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
            named = [index for index in free[shape] if f".{_dotted(found.paths[index])}".endswith(f".{each.key}")]
            if isinstance(each.key, str) and len(named) == 1:
                chosen.append((each, named[0]))
        for each, index in chosen:
            found.unknown.discard(index)
            found.roles[index] = "weight"
            found.weight_of[each.first] = found.weight_of[each.second] = index


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _params_of(group: DictNode) -> list[Key]:
    params = _child(group, "params")
    if isinstance(params, ConvertedNode) and params.name.startswith(COUNT):
        ends = [child.value for child in parts_of(params.child) if isinstance(child, ValueNode)]
        begin, end = ends if len(ends) == 2 else (None, None)
        # A state that was read from disk may contain any values.
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
    # True == 1 in Python, but they are different keys.
    return next((child for own, child in items_of(node) if type(own) is type(key) and own == key), None)


def _number(node: Node) -> float | None:
    if not isinstance(node, ValueNode) or node.type not in ("int", "float"):
        return None
    value = decode_plain(node)
    return float(value) if isinstance(value, int | float) else None
