"""Checkpoints without bytes of tensors: the user's training code makes the state again, and hashes prove it.

docs/FORMAT.md, section 15, has the rules. Determinism is the user's duty; here it is only checked. ``demote.py``
publishes what ``form_of_stored`` and ``reproduce`` have proved.

Invariants:
- A state is returned only if every tensor has the bytes of the checkpoint.
- Everything that is no tensor is stored, and is never taken from what the training code returns.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from ckstore.concurrency import map_in_threads
from ckstore.config import MIB, Policy
from ckstore.errors import CorruptError, NotFoundError, ReplayError, UnsupportedError, UsageError
from ckstore.format.logical import EXACT_FIDELITY
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import is_many
from ckstore.format.replay_form import HashedStorage, ReplayBase, ReplayForm, replay_form_of
from ckstore.format.tree import (
    PACKED_NUMBERS,
    PACKED_PLAIN,
    ConvertedNode,
    Node,
    TensorNode,
    is_in_replay_form,
    leaves_of,
    parts_of,
    place_of,
    tensors_of,
)
from ckstore.hashing import digest_of, new_hasher
from ckstore.ops.stored_checkpoint import stored_state
from ckstore.restore.restore import Restored, RestoreRequest, restore_manifest
from ckstore.state.capture import Captured, capture, loaded_adapters
from ckstore.state.environment import differences, environment_of
from ckstore.state.placement import prepare_restore
from ckstore.state.tensors import HostStorage
from ckstore.state.values import LONG_TEXT
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.refs import Reference, header_or_none, load_whole, resolve
from ckstore.store.replay_bases import find_base
from ckstore.store.repository import Repository

TrainUntil = Callable[[Any, int], Any]
"""The user's training code: gets the state of the base and the step to reach. Returns the state at that step; None: it
has changed the given one in place."""

FUNCTION = "train_until"
"""Name of that function in a script."""

VALUES_NBYTES_MAX = 1 * MIB
"""Bytes of long plain values that a checkpoint in replay form may have."""

_READ_NBYTES = 4 * MIB
_PLAIN_NAMES = (LONG_TEXT, *PACKED_NUMBERS, PACKED_PLAIN)


# What a checkpoint must be


def choose_base(repository: Repository, manifest: Manifest, leaving: Collection[int] = ()) -> Manifest | None:
    """Return the newest exact, whole checkpoint before one, from which training can lead to it; None: there is none.

    Args:
        repository: The store and its run.
        manifest: The checkpoint.
        leaving: Seqs of checkpoints that are not to be taken.
    """
    header = manifest.header
    for name in reversed(repository.manifests.listing().names):
        if name.seq >= header.seq or name.step >= header.step or name.seq in leaving:
            continue
        try:
            found = header_or_none(repository.manifests, name)
            if found is None or found.is_archival or found.fidelity != EXACT_FIDELITY:
                continue
            base = load_whole(repository, name)
        except (CorruptError, NotFoundError):
            continue
        is_lost = any(pack.tier == LOST_TIER for pack in base.packs)
        if not (is_lost or is_many(base.tree) or is_in_replay_form(base.tree)):
            return base
    return None


def form_of_stored(repository: Repository, policy: Policy, manifest: Manifest, base: Manifest) -> ReplayForm:
    """Return the replay form of a checkpoint that is stored whole. Reads all its bytes.

    Raises:
        UnsupportedError: It cannot have this form.
        CorruptError: It is damaged.
    """
    header = manifest.header
    where = f"step {header.step} (seq {header.seq})"
    if is_many(manifest.tree):
        raise UnsupportedError("a checkpoint by many ranks cannot be put in replay form", where=where)
    plain = _storages_of_values(manifest)
    nbytes = sum(manifest.storages[index].nbytes for index in plain)
    if nbytes > VALUES_NBYTES_MAX:
        raise UnsupportedError(
            f"its values other than tensors have {nbytes} bytes, and replay form stores at most {VALUES_NBYTES_MAX}",
            where=where,
        )
    with stored_state(repository, manifest) as state:
        digests = digests_of(state.storages, policy.thread_count)
        values = {index: bytes(state.storages[index].read(0, state.storages[index].nbytes)) for index in plain}
    return ReplayForm(
        base=ReplayBase(base.header.seq, base.header.step, base.checkpoint_id),
        environment=environment_of(()),
        tree=manifest.tree,
        tensors=tuple(manifest.tensors),
        storages=tuple(
            HashedStorage(storage.nbytes, storage.element_width, storage.is_float, digest)
            for storage, digest in zip(manifest.storages, digests, strict=True)
        ),
        values=values,
    )


def _storages_of_values(manifest: Manifest) -> list[int]:
    """Return the storages that only long plain values view, ascending."""
    values = set(_tensors_of_values(manifest.tree))
    of_values, others = set[int](), set[int]()
    for index, tensor in enumerate(manifest.tensors):
        (of_values if index in values or tensor.library == "bytes" else others).add(tensor.storage)
    return sorted(of_values - others)


def _tensors_of_values(node: Node) -> Iterator[int]:
    if isinstance(node, ConvertedNode) and node.name.startswith(_PLAIN_NAMES):
        yield from tensors_of(node.child)
    else:
        for part in parts_of(node):
            yield from _tensors_of_values(part)


def digests_of(storages: Sequence[HostStorage], thread_count: int) -> list[bytes]:
    """Return the BLAKE3-256 of each storage. Hashing releases the GIL."""

    def digest(storage: HostStorage) -> bytes:
        hasher = new_hasher()
        for lo in range(0, storage.nbytes, _READ_NBYTES):
            hasher.update(storage.read(lo, min(storage.nbytes, lo + _READ_NBYTES)))
        return hasher.digest()

    if thread_count == 1 or len(storages) == 1:
        return list(map(digest, storages))
    return list(map_in_threads(digest, storages, count_max=thread_count, name="ckstore-replay"))


# Training again


def reproduce(
    repository: Repository,
    policy: Policy,
    checkpoint: tuple[Manifest, ReplayForm],
    request: RestoreRequest,
    train_until: TrainUntil,
) -> Captured:
    """Restore the base, call the user's training code, and compare what it makes with a checkpoint.

    Args:
        repository: The store and its run.
        policy: Threads, memory and checks.
        checkpoint: The checkpoint, and what its state must be.
        request: Into what the base is restored, and where.
        train_until: The training code.

    Returns:
        The state that it has made, captured.

    Raises:
        ReplayError: It differs.
        CorruptError: The base is damaged.
        NotFoundError: The base is gone.
    """
    manifest, form = checkpoint
    name = find_base(repository.manifests, form.base)
    if name is None:
        raise NotFoundError(
            f"step {manifest.header.step} (seq {manifest.header.seq}) begins from step {form.base.step} (seq "
            f"{form.base.seq}), which is not in place",
            where=repository.backend.root,
            todo=f"bring it back with `ckstore undelete {repository.backend.root} seq:{form.base.seq}`",
        )
    base = load_whole(repository, name, takes_lower=True)
    state = restore_manifest(repository, policy, base, (), replace(request, only=None)).state
    found = train_until(state, manifest.header.step)
    captured = capture(state if found is None else found, loaded_adapters())
    require_equal(captured, checkpoint, policy.thread_count)
    return captured


def require_equal(captured: Captured, checkpoint: tuple[Manifest, ReplayForm], thread_count: int) -> None:
    """Compare a state with a checkpoint, in the order of the tree.

    Raises:
        ReplayError: A tensor is missing, or has another layout or other bytes. The error names the first one.
    """
    manifest, form = checkpoint
    live = {path: leaf.tensor for path, leaf in leaves_of(captured.tree) if isinstance(leaf, TensorNode)}
    digests = digests_of(captured.storages, thread_count)
    compared: set[int] = set()
    for path, leaf in leaves_of(form.tree):
        if not isinstance(leaf, TensorNode):
            continue
        spec = form.tensors[leaf.tensor]
        stored = form.storages[spec.storage]
        if spec.storage in form.values:
            continue
        if path not in live:
            raise _differs(checkpoint, place_of(path), "is not in the state that the training code has made")
        tensor = captured.tensors[live[path]]
        storage = captured.storages[tensor.storage]
        facts = [
            (each.library, each.dtype, each.shape, each.strides, each.offset, nbytes)
            for each, nbytes in ((spec, stored.nbytes), (tensor, storage.nbytes))
        ]
        if facts[0] != facts[1]:
            was, now = (f"{dtype} {shape}, strides {strides}" for _, dtype, shape, strides, _, _ in facts)
            raise _differs(checkpoint, place_of(path), f"has another layout: {was} then, {now} now")
        if digests[tensor.storage] != stored.digest:
            raise _differs(checkpoint, place_of(path), "has other bytes than it had then")
        compared.add(spec.storage)
    if compared | form.values.keys() != set(range(len(form.storages))):
        raise UnsupportedError(
            "tensors in the metadata of an OrderedDict cannot be in replay form",
            where=f"run {manifest.header.run!r}, seq {manifest.header.seq}",
        )


def _differs(checkpoint: tuple[Manifest, ReplayForm], path: str, what: str) -> ReplayError:
    manifest, form = checkpoint
    step, base = manifest.header.step, form.base
    now = environment_of(())
    same = "; ".join(f"{name} {text}" for name, text in now.items())
    facts = differences(form.environment, now) or f"then and now: {same}"
    return ReplayError(
        f"{path} {what}, after training from step {base.step} to step {step} ({facts})",
        where=f"run {manifest.header.run!r}, seq {manifest.header.seq}",
        todo=f"train on a machine like that of the run, with deterministic algorithms, or use step {base.step}",
        path=path,
        step=step,
        base_step=base.step,
    )


def restore_replayed(
    repository: Repository, policy: Policy, ref: Reference, request: RestoreRequest, train_until: TrainUntil
) -> Restored | None:
    """Restore a checkpoint in replay form; None: the checkpoint is stored whole.

    Raises:
        ReplayError: The training code makes another state.
        UsageError: The arguments do not fit.
    """
    require_function(train_until)
    repository.wait_for_orphan()
    manifest = load_whole(repository, resolve(repository, ref), takes_lower=True)
    form = replay_form_of(manifest, repository.backend.root)
    if form is None:
        return None
    if request.rank is not None:
        raise UsageError("replay= needs a store that was opened without ranks", where=f"restore({ref!r})")
    if request.only is not None:
        raise UsageError("replay= makes the whole state", where="only=", todo="leave out only=, or replay=")
    captured = reproduce(repository, policy, (manifest, form), request, train_until)
    base = find_base(repository.manifests, form.base)
    assert base is not None, "it was restored"
    state = _placed(captured, form, request)
    return Restored(state, manifest, (), load_whole(repository, base, takes_lower=True))


def _placed(captured: Captured, form: ReplayForm, request: RestoreRequest) -> Any:
    """Return the stored state with the tensors that training has made, or fill ``into`` with it."""
    targets = prepare_restore(
        form.tree, form.tensors, form.specs, into=request.into, device=request.device, adapters=loaded_adapters()
    )
    live = {path: leaf.tensor for path, leaf in leaves_of(captured.tree) if isinstance(leaf, TensorNode)}
    source_of: dict[int, int] = {}
    for path, leaf in leaves_of(form.tree):
        if isinstance(leaf, TensorNode) and path in live:
            source_of.setdefault(form.tensors[leaf.tensor].storage, captured.tensors[live[path]].storage)
    for index in targets.storages:
        storage = form.storages[index]
        plain: Any = form.values.get(index)
        if plain is None:
            plain = captured.storages[source_of[index]].read(0, storage.nbytes)
        destination = targets.destination(index)
        np.frombuffer(destination, np.uint8)[:] = np.frombuffer(plain, np.uint8)
        if digest_of(destination) != storage.digest:
            # Tensors of ``into`` are targets and sources: one was overwritten before it was copied.
            raise UsageError(
                "the training code has returned tensors of into= at other places of the state",
                todo="change the given state in place and return None, or return tensors of your own",
            )
        targets.complete(index)
    return targets.finish()


def verify_replayed(repository: Repository, policy: Policy, ref: Reference | None, train_until: TrainUntil) -> str:
    """Train a stretch again that leads to a checkpoint, and compare; return what was compared, in a sentence.

    Args:
        repository: The store and its run.
        policy: Threads, memory and checks.
        ref: The checkpoint; None: the newest one. It may be in replay form.
        train_until: The training code.

    Raises:
        ReplayError: It makes another state.
        UsageError: No exact, whole checkpoint precedes it.
        CorruptError: One of the two is damaged.
    """
    require_function(train_until)
    manifest = load_whole(repository, resolve(repository, "latest" if ref is None else ref), takes_lower=True)
    header = manifest.header
    form = replay_form_of(manifest, repository.backend.root)
    if form is None:
        if header.fidelity != EXACT_FIDELITY:
            raise UnsupportedError(
                f"step {header.step} (seq {header.seq}) is stored with a loss, so training cannot make it again",
                where=repository.backend.root,
            )
        base = choose_base(repository, manifest)
        if base is None:
            raise no_base_error(repository, manifest)
        form = form_of_stored(repository, policy, manifest, base)
    request = RestoreRequest(into=None, only=None, device=None, exact=True, on_progress=None)
    reproduce(repository, policy, (manifest, form), request, train_until)
    return f"training from step {form.base.step} to step {header.step} makes the same {len(form.tensors)} tensors again"


def no_base_error(repository: Repository, manifest: Manifest) -> UsageError:
    """Return the error for a checkpoint without one from which training could lead to it."""
    header = manifest.header
    return UsageError(
        f"no exact, whole checkpoint of a lower step precedes step {header.step} (seq {header.seq})",
        where=repository.backend.root,
        todo="choose a later checkpoint; `ckstore ls` lists them",
    )


def require_function(train_until: object) -> None:
    """Refuse what is not a function.

    Raises:
        UsageError: It cannot be called.
    """
    if not callable(train_until):
        raise UsageError(
            "replay= takes a function that gets a state and a step, and returns the state at that step",
            where=f"replay={train_until!r}"[:80],
        )


def train_until_of(script: str) -> TrainUntil:
    """Load the function ``train_until`` from a Python file. The file is run.

    Raises:
        UsageError: There is no such file, or no such function in it.
    """
    path = FilePath(script).absolute()
    spec = importlib.util.spec_from_file_location("ckstore_replay_script", path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError("not a Python file", where=script, todo=f"pass a file that defines {FUNCTION}(state, step)")
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: it may import the modules in its folder.
    sys.path.insert(0, str(path.parent))
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: object = getattr(module, FUNCTION, None)
    if not callable(found):
        raise UsageError(f"the script has no function {FUNCTION}", where=script, todo=f"define {FUNCTION}(state, step)")
    return found
