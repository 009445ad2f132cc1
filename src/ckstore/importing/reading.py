"""The state of a foreign checkpoint, put together from its files.

Each file is read as what it is, whatever its name says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore.capture import Captured
from ckstore.errors import UnsupportedError
from ckstore.importing.discover import Found, Part
from ckstore.importing.loader import Loader
from ckstore.importing.nature import check_nature
from ckstore.importing.safetensors_file import open_safetensors
from ckstore.importing.storable import Loaded, storable
from ckstore.importing.storages import joined, merged
from ckstore.importing.trainer_state import read_json, read_trainer_state
from ckstore.tree import DictNode, ValueNode, items_of
from ckstore.values import decode_plain


@dataclass(slots=True)
class Reader:
    """Reads checkpoints of other tools.

    Attributes:
        loader: Loads files of torch.
        skip: Globs over dotted paths of leaves that are left out.
    """

    loader: Loader
    skip: Sequence[str] = ()

    def read(self, found: Found) -> Loaded:
        """Return the state of a checkpoint: of one file as it is, of several under a key for each."""
        if len(found.parts) == 1 and not found.parts[0].key:
            return self._part(found.parts[0])
        left_out: dict[str, str] = {}
        parts: list[tuple[str, Captured]] = []
        for part in found.parts:
            loaded = self._part(part)
            left_out |= loaded.left_out
            parts.append((part.key, loaded.captured))
        if found.trainer_state is not None:
            loaded = self._storable(read_trainer_state(found.trainer_state), "trainer_state", found.trainer_state)
            left_out |= loaded.left_out
            parts.append(("trainer_state", loaded.captured))
        return Loaded(joined(parts), left_out)

    def plain_values(self, part: Part) -> dict[str, object]:
        """Return the plain values that stand directly in a part, without reading its tensors."""
        if part.kind not in ("torch", "dcp"):
            return {}
        found: dict[str, object] = {}
        for path in part.paths:
            kind = part.kind if part.kind == "dcp" else check_nature(path, part.kind)
            if kind != "safetensors":
                found |= plain_values(self._by_child(kind, part, path, is_peek=True).captured)
        return found

    def _part(self, part: Part) -> Loaded:
        shards = [self._file(part, path) for path in part.paths]
        left_out = {name: why for shard in shards for name, why in shard.left_out.items()}
        return Loaded(merged([shard.captured for shard in shards], where=str(part.paths[0])), left_out)

    def _file(self, part: Part, path: Path) -> Loaded:
        kind = part.kind if part.kind == "dcp" else check_nature(path, part.kind)
        if kind == "safetensors":
            return open_safetensors(path, key=part.key, skip=self.skip)
        if kind == "json":
            return self._storable(read_json(path), part.key, path)
        return self._by_child(kind, part, path)

    def _storable(self, state: Any, key: str, path: Path) -> Loaded:
        return storable(state, [], key=key, skip=self.skip, where=str(path))

    def _by_child(self, kind: str, part: Part, path: Path, *, is_peek: bool = False) -> Loaded:
        if importlib.util.find_spec("torch") is None:
            raise UnsupportedError(
                "torch is not installed, and reads such files", where=path,
                todo="install torch 2.10 or later; safetensors files need none",
            )  # fmt: skip
        nbytes = path.stat().st_size if path.is_file() else part.nbytes
        return self.loader.load(kind, path, nbytes, key=part.key, skip=self.skip, is_peek=is_peek)


def plain_values(captured: Captured) -> dict[str, object]:
    """Return the plain values that stand directly in a state."""
    if not isinstance(captured.tree, DictNode):
        return {}
    plain = ("none", "bool", "int", "float", "str")
    return {
        str(key): decode_plain(node)
        for key, node in items_of(captured.tree)
        if isinstance(node, ValueNode) and node.type in plain
    }
