"""The weights of a checkpoint: which tensors, under which names, which are tied, and how they are split into files.

Everything here comes from the manifest. No tensor is read.

Invariants:
- Every name is valid in a safetensors file, and no two weights have the same name.
- `shards_of` groups like huggingface_hub's ``split_torch_state_dict_into_shards``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckstore.errors import NotFoundError, UnsupportedError, UsageError
from ckstore.format.manifest import Manifest
from ckstore.format.tensors import TensorSpec, count_of
from ckstore.format.tree import DictNode, ListNode, Node, Path, Selection, TensorNode, TupleNode, format_path, items_of
from ckstore.ops.interop.safetensors import ITEMSIZES, NUMPY_DTYPES, TORCH_DTYPES

MODEL_KEY = "model"
"""The part of a state that is exported unless the caller selects something else."""

ADAPTERS_KEY = "adapters"
"""The part that has the tensors of each adapter under the adapter's name."""

_LISTED_MAX = 5


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        tensor: Its index in the manifest.
        identity: Equal for weights that share all their memory.
        dtype: Its dtype in the file, as safetensors names it.
        shape: Its shape in the file.
        itemsize: Bytes per element.
        nbytes: Bytes in the file.
        read_nbytes: Bytes before a conversion to another dtype.
        adapter: The adapter in the part ``adapters`` that it belongs to; None: it is not in that part.
    """

    name: str
    tensor: int
    identity: tuple[object, ...]
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int
    read_nbytes: int
    adapter: str | None = None

    @property
    def is_float(self) -> bool:
        """Whether ``--dtype`` applies to it: it does not to integers, nor to the 8 and 4 bits of quantized weights."""
        return self.dtype in ("F64", "F32", "F16", "BF16")

    def as_dtype(self, dtype: str) -> Weight:
        """Return it with another floating-point dtype."""
        itemsize = ITEMSIZES[dtype]
        return replace(self, dtype=dtype, itemsize=itemsize, nbytes=self.nbytes // self.itemsize * itemsize)


def select_weights(
    manifest: Manifest,
    *,
    only: str | Sequence[str] | None,
    strip_prefix: str | None,
    without: Collection[str] = (),
    has_adapters: bool = False,
) -> tuple[list[Weight], dict[str, str]]:
    """Return the weights to export, in the order of the state, and path -> reason for selected leaves without weights.

    Args:
        manifest: The checkpoint; see ``plain_manifest``.
        only: Globs over dotted paths. None: the part ``model``, or the whole state if it is one flat dict of tensors;
            with ``has_adapters``, the parts ``adapters`` and ``model``.
        strip_prefix: Removed from every path. None: the key of the part ``model``.
        without: Top-level keys that contain no weights.
        has_adapters: The part ``adapters`` contains adapters of PEFT. Their weights get the name that is below the
            name of their adapter.

    Raises:
        NotFoundError: Nothing is selected, or no tensor is.
        UsageError: The state has several parts and none is ``model``, a path lacks the prefix, two have one name, or
            adapters are given a prefix.
        UnsupportedError: safetensors does not support a dtype.
    """
    leaves = [(path, node) for path, node in _leaves(manifest.tree, ()) if not path or path[0] not in without]
    if only is not None:
        selection = Selection(only, manifest.tree)
        leaves = [(path, node) for path, node in leaves if selection.covers(path)]
    tensors = {path: index for path, node in leaves if (index := _tensor_of(node, manifest)) is not None}
    if only is None:
        parts = (ADAPTERS_KEY, MODEL_KEY) if has_adapters else _default_parts(list(tensors))
        leaves = [(path, node) for path, node in leaves if parts is None or path[0] in parts]
        tensors = {path: index for path, index in tensors.items() if parts is None or path[0] in parts}
    if not tensors:
        raise NotFoundError("there is no tensor to export", todo="`ckstore show` lists the checkpoint's tensors")
    named = _named(tensors, strip_prefix, has_adapters=has_adapters)
    weights = [replace(_weight(manifest, index, name), adapter=adapter) for (adapter, name), index in named.items()]
    left_out = {format_path(path): "a plain value, not a tensor" for path, _ in leaves if path not in tensors}
    return weights, left_out


def _leaves(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield tensors, and everything else that is not a plain container."""
    if isinstance(node, DictNode | ListNode | TupleNode):
        for key, child in items_of(node):
            yield from _leaves(child, (*path, key))
    else:
        yield path, node


def _tensor_of(node: Node, manifest: Manifest) -> int | None:
    """Return the index of a tensor; None for a plain value, which includes long bytes."""
    if not isinstance(node, TensorNode) or manifest.tensors[node.tensor].library == "bytes":
        return None
    return node.tensor


def _default_parts(paths: Sequence[Path]) -> tuple[str, ...] | None:
    """Return the keys of the parts that contain the weights; None if it is the whole state."""
    if any(path[0] == MODEL_KEY for path in paths if len(path) > 1):
        return (MODEL_KEY,)
    if all(len(path) <= 1 for path in paths):
        return None
    parts = dict.fromkeys(format_path(path[:1]) for path in paths)
    raise UsageError(
        f"the state has no part {MODEL_KEY!r}; it contains {_some(parts)}",
        todo=f"choose the weights, for example with --only '{next(iter(parts))}.*' --strip-prefix {next(iter(parts))}.",
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f", and {len(listed) - _LISTED_MAX} more" if len(listed) > _LISTED_MAX else ""
    return ", ".join(listed[:_LISTED_MAX]) + more


def _named(
    tensors: Mapping[Path, int], strip_prefix: str | None, *, has_adapters: bool
) -> dict[tuple[str | None, str], int]:
    """Return each tensor by its adapter and its name."""
    named: dict[tuple[str | None, str], int] = {}
    for path, index in tensors.items():
        adapter = str(path[1]) if has_adapters and path[0] == ADAPTERS_KEY else None
        if adapter is not None:
            if strip_prefix is not None:
                raise UsageError(
                    "the names of an adapter's weights are those of PEFT already", where=format_path(path),
                    todo="leave out --strip-prefix",
                )  # fmt: skip
            name = format_path(path[2:])
        elif strip_prefix is None:
            name = format_path(path[1:] if path[:1] == (MODEL_KEY,) and len(path) > 1 else path)
        else:
            name = without_prefix(format_path(path), strip_prefix)
        if not name:
            raise UsageError("the state contains a tensor without a name", todo="choose others with --only")
        if (adapter, name) in named:
            raise UsageError("two tensors have the same name", where=name, todo="choose one of them with --only")
        check_name(name)
        named[adapter, name] = index
    return named


def without_prefix(name: str, prefix: str) -> str:
    """Return a path without its prefix.

    Raises:
        UsageError: It does not begin with the prefix, or nothing else remains.
    """
    if not name.startswith(prefix) or name == prefix:
        raise UsageError(
            f"the path of a tensor does not begin with {prefix!r}, or ends with it", where=name,
            todo=f"choose the tensors with --only '{prefix}*', or leave out --strip-prefix",
        )  # fmt: skip
    return name[len(prefix) :]


def check_name(name: str) -> None:
    """Refuse a name that a safetensors file cannot contain.

    Raises:
        UsageError: It is reserved, or not valid Unicode.
    """
    if name == "__metadata__":
        raise UsageError("safetensors reserves this name", where=name, todo="choose other leaves with --only")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError("the path of a leaf is not valid Unicode", where=repr(name)) from None


def _weight(manifest: Manifest, index: int, name: str) -> Weight:
    found = weight_of(manifest, index, name)
    if found is None:
        dtype = manifest.tensors[index].dtype
        raise UnsupportedError(f"safetensors has no dtype {dtype}", where=name, todo="choose other tensors with --only")
    return found


def weight_of(manifest: Manifest, index: int, name: str = "") -> Weight | None:
    """Return how to write a tensor; None if safetensors has no such dtype."""
    spec = manifest.tensors[index]
    dtype = _dtype_of(spec)
    if dtype is None:
        return None
    itemsize = ITEMSIZES[dtype]
    nbytes = count_of(spec.shape) * itemsize
    # safetensors counts four-bit elements, torch counts pairs of them.
    shape = (*spec.shape[:-1], 2 * spec.shape[-1]) if dtype == "F4" else spec.shape
    identity: tuple[object, ...] = (spec.library, dtype, spec.shape, spec.strides, spec.storage, spec.offset, spec.cuts)
    return Weight(name, index, identity if nbytes else (name,), dtype, shape, itemsize, nbytes, nbytes)


def _dtype_of(spec: TensorSpec) -> str | None:
    if spec.library == "torch":
        return None if spec.dtype == "float4_e2m1fn_x2" and not spec.shape else TORCH_DTYPES.get(spec.dtype)
    return NUMPY_DTYPES.get(spec.dtype[1:]) if spec.library == "numpy" else None


def tied_names(weights: Sequence[Weight], targets: Mapping[str, str] | None) -> dict[str, str]:
    """Return name -> other name for weights that need not be written, because loading ties them to another weight.

    Args:
        weights: The weights, in the order of the state.
        targets: Name -> name of the weight that the model class ties it to. None: unknown. Then the first name of
            tied weights is the one to write, as the classes of transformers have it.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for weight in weights:
        groups.setdefault(weight.identity, []).append(weight.name)
    tied: dict[str, str] = {}
    for names in groups.values():
        if targets is None:
            tied.update((name, names[0]) for name in names[1:])
        else:
            tied.update((name, targets[name]) for name in names if targets.get(name) in names)
    return tied


def shards_of(sizes: Mapping[str, int], nbytes_max: int) -> list[list[str]]:
    """Return the names for each file, in order, so that no file has more bytes unless a single weight has.

    Source: ``split_state_dict_into_shards_factory``, huggingface_hub:src/huggingface_hub/serialization/_base.py.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    current_nbytes = 0
    for name, nbytes in sizes.items():
        if nbytes > nbytes_max:
            shards.append([name])
            continue
        if current_nbytes + nbytes > nbytes_max:
            shards.append(current)
            current, current_nbytes = [], 0
        current.append(name)
        current_nbytes += nbytes
    return [*shards, current] if current else shards
