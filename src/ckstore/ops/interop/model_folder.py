"""Write the folder of a model, which transformers' ``from_pretrained`` or PEFT loads.

The folder gets the weights (``model.safetensors``, or several files and ``model.safetensors.index.json``) and the small
files that the checkpoint contains under the key ``files``, such as ``config.json``.

Invariants:
- The file that makes the folder loadable gets its name last: the index, or the only file of weights
  (`target_folder.py`).
- All weights come from one manifest.
- Tensors are read and written in groups of about 64 MiB. Only weights whose layout transformers must change are held in
  memory together.
- Names of small files are not trusted: nothing is written outside of the folder.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ckstore.config import Policy
from ckstore.errors import UsageError
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.tree import DictNode, items_of, tensors_of
from ckstore.hashing import new_token
from ckstore.ops.interop.adapters import ADAPTER_CONFIG, ADAPTER_STEM, adapters_of, has_adapters_part, is_adapter
from ckstore.ops.interop.discover import SMALL_FILES_KEY, TRAINER_FILE
from ckstore.ops.interop.export import BLOCK_NBYTES, item_of
from ckstore.ops.interop.hub_model import HubModel, config_with_dtype, find_hub_model
from ckstore.ops.interop.safetensors import encode_header, read_header
from ckstore.ops.interop.stored_tensors import TensorReader, groups_of
from ckstore.ops.interop.target_folder import WEIGHTS, TargetFolder, sync_file, write_synced
from ckstore.ops.interop.weights import Weight, select_weights, shards_of, tied_names
from ckstore.results import Info
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Names that callers use -> names in safetensors."""

MAX_SHARD_NBYTES = 5 * 10**9
"""Default of huggingface_hub."""

INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_METADATA = {"format": "pt"}
_PIECE_COUNT = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What to export; the fields are arguments of ``Store.export_hf``."""

    folder: Path
    only: str | Sequence[str] | None = None
    strip_prefix: str | None = None
    dtype: str | None = None
    max_shard_nbytes: int = MAX_SHARD_NBYTES
    force: bool = False
    on_progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The result of an export to a folder.

    Attributes:
        info: The checkpoint.
        folder: The folder.
        files: The files that were written, by their paths in it.
        tensor_count: Number of tensors in them.
        nbytes: Total bytes of the files of weights.
        tied: Name of a weight that is not written -> name of the weight that loading ties it to.
        left_out: Path or file name -> reason why it was not written.
        notes: Sentences for the user.
    """

    info: Info
    folder: str
    files: tuple[str, ...]
    tensor_count: int
    nbytes: int
    tied: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def export_model_folder(
    repository: Repository, policy: Policy, manifest: Manifest, info: Info, request: ModelRequest
) -> ExportedModel:
    """Write the weights and the small files of a checkpoint to a folder.

    Raises:
        UsageError: The folder contains files that would be replaced or loaded instead, or the weights are not those of
            the model that ``config.json`` names.
        UnsupportedError: The weights cannot be written in a layout that loads.
        CapacityError: The disk is full. The folder is unchanged.
        CkstoreError: As for ``Store.restore``.
    """
    require_stored(manifest, repository.backend.root, what="exported")
    return _Export(repository, policy, plain_manifest(manifest), info, request).run()


@dataclass(slots=True)
class _Export:
    """One export."""

    repository: Repository
    policy: Policy
    manifest: Manifest
    info: Info
    request: ModelRequest
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tensor_count: int = 0
    weights_nbytes: int = 0
    _done: int = 0
    _total: int = 0

    def run(self) -> ExportedModel:
        """Plan, write the draft, publish it."""
        request = self.request
        if request.dtype not in (None, *DTYPES):
            raise UsageError("not a dtype of weights", where=repr(request.dtype), todo=f"use {', '.join(DTYPES)}")
        if self.info.fidelity != "exact":
            self.notes.append(f"The checkpoint was stored with a loss ({self.info.fidelity}).")
        files = self._stored_files()
        has_adapters = has_adapters_part(self.manifest.tree, files)
        weights, left_out = select_weights(
            self.manifest,
            only=request.only,
            strip_prefix=request.strip_prefix,
            without=(SMALL_FILES_KEY,) if files else (),
            has_adapters=has_adapters,
        )
        self.left_out |= left_out
        if request.dtype is not None:
            weights = [each.as_dtype(DTYPES[request.dtype]) if each.is_float else each for each in weights]
            if _CONFIG in files:
                files[_CONFIG] = config_with_dtype(files[_CONFIG], _TORCH_DTYPES[DTYPES[request.dtype]])
        tied: dict[str, str] = {}
        by_file: dict[str, list[Weight]] | None = None
        if is_adapter(weights):
            by_file = self._plan_adapters(weights, files)
            model = None
        else:
            if has_adapters:
                self._leave_out_configs(files, ())
            model = self._hub_model(weights, files.get(_CONFIG))
            tied = tied_names(weights, _tied_targets(model, files.get(_CONFIG)))
            weights = [each for each in weights if each.name not in tied]
            if model is None or model.save is None:
                by_file = files_of(weights, request.max_shard_nbytes)
        laid = self._files_to_lay(files)
        names = self._write(by_file, weights, model, laid)
        return ExportedModel(
            info=self.info,
            folder=str(request.folder),
            files=tuple(names),
            tensor_count=self.tensor_count,
            nbytes=self.weights_nbytes,
            tied=tied,
            left_out=self.left_out,
            notes=tuple(self.notes),
        )

    def _plan_adapters(self, weights: Sequence[Weight], files: dict[str, bytes]) -> dict[str, list[Weight]]:
        """Return the weights of each adapter's file, and remove the configs of other adapters from the small files."""
        by_file, left_out = adapters_of(weights, files)
        self.left_out |= left_out
        self._leave_out_configs(files, by_file)
        folders = sorted(str(PurePosixPath(name).parent) for name in by_file)
        if "." not in folders:
            self.notes.append(f"PEFT loads each adapter from its own folder: {', '.join(folders)}.")
        return by_file

    def _leave_out_configs(self, files: dict[str, bytes], by_file: Collection[str]) -> None:
        """Remove configs of adapters whose weights are not written: PEFT and transformers would look for these."""
        for name in [each for each in files if PurePosixPath(each).name == ADAPTER_CONFIG]:
            if f"{name.removesuffix(ADAPTER_CONFIG)}{ADAPTER_STEM}.safetensors" not in by_file:
                del files[name]
                self.left_out[f"{SMALL_FILES_KEY}.{name}"] = "of an adapter that is not exported"

    def _stored_files(self) -> dict[str, bytes]:
        """Return the small files of the checkpoint; empty if the key is used for something else."""
        tree = self.manifest.tree
        node = dict(items_of(tree)).get(SMALL_FILES_KEY) if isinstance(tree, DictNode) else None
        if node is None or any(self.manifest.tensors[index].library != "bytes" for index in tensors_of(node)):
            return {}
        found = self._reader.restore(SMALL_FILES_KEY).get(SMALL_FILES_KEY)
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(content, bytes | str) for name, content in found.items()
        ):
            return {}
        return {name: content if isinstance(content, bytes) else content.encode() for name, content in found.items()}

    @property
    def _reader(self) -> TensorReader:
        return TensorReader(self.repository, self.policy, self.manifest)

    def _read(self, weights: Sequence[Weight]) -> Iterator[tuple[list[Weight], dict[str, Any]]]:
        """Yield weights in groups, and each group's tensors by name."""
        for group in groups_of(weights, lambda each: each.read_nbytes):
            yield group, self._reader.read({each.name: each.tensor for each in group})

    def _hub_model(self, weights: Sequence[Weight], config: bytes | None) -> HubModel | None:
        found = find_hub_model(config, {each.name: each.shape for each in weights})
        if isinstance(found, HubModel):
            return found
        self.notes.append(found)
        return None

    def _files_to_lay(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        laid: dict[str, bytes] = {}
        for name, content in files.items():
            why = _not_laid_reason(name, files)
            if why is None:
                laid[name] = content
            else:
                self.left_out[f"{SMALL_FILES_KEY}.{name}"] = why
        return laid

    def _write(
        self,
        by_file: Mapping[str, Sequence[Weight]] | None,
        weights: Sequence[Weight],
        model: HubModel | None,
        laid: Mapping[str, bytes],
    ) -> list[str]:
        """Write all files, and return their names; the one that makes the folder loadable is the last."""
        target = TargetFolder(self.request.folder, force=self.request.force)
        target.check([*laid, *(by_file or ())])
        self.notes += target.leftovers()
        with target.draft() as draft:
            for name, content in laid.items():
                write_synced(draft / name, [content])
            if by_file is None:
                assert model is not None, "only a model's class can change the layout"
                names = self._write_by_class(model, weights, draft)
            else:
                names = self._write_files(by_file, draft)
            names = [*laid, *names]
            target.check(names)
            target.publish(draft, names)
        return names

    def _write_files(self, by_file: Mapping[str, Sequence[Weight]], draft: Path) -> list[str]:
        self._total = sum(each.nbytes for weights in by_file.values() for each in weights)
        for name, weights in by_file.items():
            write_synced(draft / name, self._blocks(weights))
            self.tensor_count += len(weights)
            self.weights_nbytes += (draft / name).stat().st_size
        index = index_of(by_file)
        if index is None:
            return list(by_file)
        write_synced(draft / INDEX, [index])
        return [*by_file, INDEX]

    def _blocks(self, weights: Sequence[Weight]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a file of weights."""
        # Wide elements first, like the format's own writer, so that every tensor is aligned.
        ordered = sorted(weights, key=lambda each: (-each.itemsize, each.name))
        yield encode_header([(each.name, each.dtype, each.shape, each.nbytes) for each in ordered], _METADATA)
        for group, leaves in self._read(ordered):
            for weight in group:
                for block in _content_of(leaves.pop(weight.name), weight):
                    yield block
                    self._note_progress(len(block))

    def _note_progress(self, nbytes: int) -> None:
        self._done += nbytes
        if self.request.on_progress is not None:
            self.request.on_progress(self._done, self._total)

    def _write_by_class(self, model: HubModel, weights: Sequence[Weight], draft: Path) -> list[str]:
        """Let transformers write the weights, and return the names of its files."""
        assert model.save is not None, "the layouts differ"
        self._total = sum(each.nbytes for each in weights)
        state: dict[str, Any] = {}
        for group, leaves in self._read(weights):
            state.update((each.name, _as_tensor(leaves.pop(each.name), each)) for each in group)
            self._note_progress(sum(each.nbytes for each in group))
        inside = draft / f".ckstore-{new_token()}"
        inside.mkdir()
        model.save(state, inside, self.request.max_shard_nbytes)
        self.notes.append(
            f"transformers wrote the weights of {model.class_name} in the layout of the hub. For this, the whole state "
            f"({self._total / 2**20:.1f} MiB) was held in memory."
        )
        names = sorted(file.name for file in inside.iterdir() if WEIGHTS.fullmatch(file.name))
        names.sort(key=lambda name: name == INDEX)
        for name in names:
            (inside / name).rename(draft / name)
            sync_file(draft / name)
            if name != INDEX:
                self._count_tensors(draft / name)
        shutil.rmtree(inside)
        return names

    def _count_tensors(self, path: Path) -> None:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            self.tensor_count += len(read_header(_reader_of(file), nbytes, where=path).entries)
        self.weights_nbytes += nbytes


def _reader_of(file: Any) -> Callable[[int, int], memoryview]:
    def read(offset: int, nbytes: int) -> memoryview:
        file.seek(offset)
        return memoryview(file.read(nbytes))

    return read


def _tied_targets(model: HubModel | None, config: bytes | None) -> Mapping[str, str] | None:
    """Return which weights loading ties; None: unknown."""
    if model is not None:
        return model.tied
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        if config is not None and json.loads(config).get("tie_word_embeddings") is False:
            return {}
    return None


def files_of(weights: Sequence[Weight], nbytes_max: int) -> dict[str, list[Weight]]:
    """Return the weights of each file, by its name."""
    by_name = {each.name: each for each in weights}
    shards = shards_of({each.name: each.nbytes for each in weights}, nbytes_max)
    if len(shards) == 1:
        return {"model.safetensors": list(weights)}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": [by_name[name] for name in names]
        for number, names in enumerate(shards, 1)
    }


def index_of(by_file: Mapping[str, Sequence[Weight]]) -> bytes | None:
    """Return the content of the index; None: there is a single file, or there are adapters, which need none."""
    if not next(iter(by_file)).startswith("model-"):
        return None
    weight_map = {each.name: name for name, weights in by_file.items() for each in weights}
    total = sum(each.nbytes for weights in by_file.values() for each in weights)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _content_of(leaf: Any, weight: Weight) -> Iterator[memoryview]:
    """Yield the bytes of a weight in its dtype."""
    item = item_of(leaf)
    assert not isinstance(item, str), f"{weight.name} was planned as {weight.dtype}"
    assert tuple(item.shape) == weight.shape
    if item.dtype != weight.dtype:
        import torch

        for piece in _converted(_torch_tensor(leaf), weight):
            yield memoryview(piece.view(torch.uint8).numpy())
        return
    content = item.content()
    for begin in range(0, len(content), BLOCK_NBYTES):
        yield content[begin : begin + BLOCK_NBYTES]


def _torch_tensor(leaf: Any) -> Any:
    import numpy as np
    import torch

    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    return leaf.detach()


def _converted(tensor: Any, weight: Weight) -> Iterator[Any]:
    """Yield the elements of a tensor in the dtype of a weight, in small pieces: temporary copies take little memory.

    Raises:
        UsageError: A finite value would become infinite.
    """
    import torch

    dtype = getattr(torch, _TORCH_DTYPES[weight.dtype])
    for piece in tensor.contiguous().reshape(-1).split(_PIECE_COUNT):
        converted = piece.to(dtype)
        if bool((converted.isinf() & piece.isfinite()).any()):
            raise UsageError(
                f"a value is too large for {dtype}", where=weight.name, todo="use --dtype bf16, or leave it out"
            )
        yield converted


def _as_tensor(leaf: Any, weight: Weight) -> Any:
    """Return a torch tensor with the dtype of a weight."""
    import torch

    tensor = _torch_tensor(leaf)
    item = item_of(tensor)
    if not isinstance(item, str) and item.dtype == weight.dtype:
        return tensor
    return torch.cat(list(_converted(tensor, weight))).reshape(tensor.shape)


def _not_laid_reason(name: str, files: Mapping[str, bytes]) -> str | None:
    """Return why a small file of the checkpoint is not written; None: it is."""
    parts = PurePosixPath(name).parts
    is_below = name == "/".join(parts) and not any(part.startswith(".") or part in ("/", "..") for part in parts)
    if not name or not is_below or "\0" in name or any(other.startswith(f"{name}/") for other in files):
        return "not a name of a file in the folder"
    if name == TRAINER_FILE:
        return "the state of a trainer; without its optimizer, training would resume wrongly"
    if name.endswith(_WEIGHT_SUFFIXES):
        return "it would be taken for weights"
    return None
