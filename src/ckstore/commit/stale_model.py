"""Suspicion: was a stale copy of the model saved again?

The commonest silent loss among users of checkpoint tools is a model that is not the one being trained: an
old copy, a wrapper's shadow, weights before a swap. It is saved without error and noticed weeks later.
When the optimizer's state has changed since the last commit and not one byte of the model has, we say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckstore.format.manifest import ChunkSpec
from ckstore.format.tensors import StorageSpec
from ckstore.format.tree import DictNode, ListNode, Node, Path, TensorNode, TupleNode, format_path, items_of
from ckstore.hashing import digest_of
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage

_OPTIMIZER_KEYS = {"state", "param_groups"}
"""What every ``torch.optim`` optimizer's state_dict has."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of every tensor of the model, and of the optimizer's state, as one commit saw them."""

    model: dict[Path, bytes]
    optimizer: dict[Path, bytes]

    @classmethod
    def of(cls, captured: Captured, storages: Sequence[StorageSpec], chunks: Sequence[ChunkSpec]) -> Fingerprint:
        """Take it from a commit whose chunks are hashed; only small storages are hashed again."""
        found = cls({}, {})
        for path, tensor, is_optimizer in _tensors(captured.tree, (), is_optimizer=False):
            index = captured.tensors[tensor].storage
            if is_optimizer or storages[index].is_float:
                side = found.optimizer if is_optimizer else found.model
                side[path] = _digest(captured.storages[index], storages[index], chunks)
        return found


def stale_warnings(before: Fingerprint | None, now: Fingerprint) -> list[str]:
    """Return what is suspicious about a commit after another one of the same handle."""
    if before is None or not now.model or not now.optimizer:
        return []
    if now.model != before.model or now.optimizer == before.optimizer:
        return []
    if now.optimizer.keys() != before.optimizer.keys():
        return []
    example = format_path(next(iter(now.model)))
    return [
        f"every one of {len(now.model)} model tensors ({example}, ...) equals the previous commit's although the "
        "optimizer's state has changed: is this a stale copy of the model?"
    ]


def _tensors(node: Node, path: Path, *, is_optimizer: bool) -> Iterator[tuple[Path, int, bool]]:
    if isinstance(node, TensorNode):
        yield path, node.tensor, is_optimizer
    elif isinstance(node, (DictNode, ListNode, TupleNode)):
        is_optimizer = is_optimizer or (isinstance(node, DictNode) and set(node.keys) >= _OPTIMIZER_KEYS)
        for key, child in items_of(node):
            yield from _tensors(child, (*path, key), is_optimizer=is_optimizer)


def _digest(source: HostStorage, storage: StorageSpec, chunks: Sequence[ChunkSpec]) -> bytes:
    if all(piece.offset == 0 and piece.nbytes == chunks[piece.chunk].nbytes for piece in storage.pieces):
        return digest_of(b"".join(chunks[piece.chunk].chunk_id for piece in storage.pieces))
    # A small storage in a shared chunk: the chunk changes with its neighbours, so hash it alone.
    return digest_of(source.read(0, storage.nbytes))
