"""What a receipt of a commit with a loss warns of beside the bounds: rules without a leaf, and numbers that are none.

Quantizers look at what they are given; small tensors, vectors, keyframes and optimizers of unknown meaning are stored
exactly without a look at their values. Who loses something on purpose is told there, too, that a run has diverged.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckstore.capture import Captured
from ckstore.diverged import is_diverged
from ckstore.lossy import Candidates
from ckstore.quant.settings import Residual, TensorSettings
from ckstore.tree import Node, Path, TensorNode, format_path, leaves_of

_NAMED_COUNT = 3
_COMPARED_COUNT = 1000


def rules_warnings(residual: Residual, tree: Node) -> list[str]:
    """Return a warning for each rule that names nothing in the state, with the path that comes nearest."""
    return named_nothing(residual, tensor_words(tree))


def tensor_words(tree: Node) -> list[str]:
    """Return the dotted paths of all tensors."""
    return [format_path(path) for path, leaf in leaves_of(tree) if isinstance(leaf, TensorNode)]


def named_nothing(residual: Residual, paths: Sequence[str]) -> list[str]:
    """Return a warning for each rule that names none of these dotted paths."""
    warnings = []
    for glob in residual.globs_without(paths):
        near = difflib.get_close_matches(glob, paths[:_COMPARED_COUNT], n=1, cutoff=0.0)
        meant = f"; the nearest path is {near[0]}" if near else ""
        warnings.append(f"the rule for {glob!r} names nothing in this state{meant}")
    return warnings


def vain_warnings(residual: Residual, captured: Captured) -> list[str]:
    """Return a warning where a policy that loses something finds nothing to quantize, and no rule of it says so."""
    if Candidates(captured, replace(residual, rules=(), tensors=TensorSettings())).tensors:
        return []
    if residual.rules and Candidates(captured, residual).tensors:
        return []
    what = f"no matrix of {residual.nelements_min} floats or more is known to be a weight or a moment of Adam"
    todo = "name weights by a rule, or commit a ckstore.TrainState"
    return [f"the fidelity {residual.name!r} found nothing to quantize, and all of this is exact: {what}; {todo}"]


def tensor_paths(tree: Node) -> dict[Path, int]:
    """Return the first path of each tensor, with its index."""
    first: dict[int, Path] = {}
    for path, leaf in leaves_of(tree):
        if isinstance(leaf, TensorNode):
            first.setdefault(leaf.tensor, path)
    return {path: tensor for tensor, path in first.items()}


def diverged_warnings(captured: Captured, looked_at: Collection[int], told: Sequence[str]) -> list[str]:
    """Return a warning where a float tensor that no quantizer has looked at holds NaN or infinity.

    Args:
        captured: The state.
        looked_at: Storages that were quantized.
        told: Warnings that were given already.
    """
    named = {warning.partition(" was stored exactly: ")[0] for warning in told}
    wrong: list[str] = []
    for path, tensor in tensor_paths(captured.tree).items():
        spec, word = captured.tensors[tensor], format_path(path)
        if spec.storage not in looked_at and word not in named and is_diverged(captured, spec):
            wrong.append(word)
    if not wrong:
        return []
    more = f" and {len(wrong) - _NAMED_COUNT} more" if len(wrong) > _NAMED_COUNT else ""
    verb = "holds" if len(wrong) == 1 else "hold"
    return [f"{', '.join(wrong[:_NAMED_COUNT])}{more} {verb} NaN or infinity: the run may have diverged"]
