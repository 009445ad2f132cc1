"""A store with thousands of checkpoints, made without writing tensors: packs are sparse files.

Everything that a collection reads is real: manifests as commits write them, claims, and packs of the right size. Only
the first checkpoint can be restored. Each checkpoint has some new tensors in a pack of its own, and shares the others
with earlier ones, like a model of which a part is trained.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

TENSORS = 300
CHANGED = 6
"""New tensors of each checkpoint, in rotation: after 50 checkpoints all have changed."""

_ELEMENTS = 65_536
_STORED_NBYTES = 200_000
_STEP_NS = 600 * 10**9


def make(place: Path, count: int, *, tensors: int = TENSORS, changed: int = CHANGED) -> int:
    """Make a store with this many checkpoints, ten minutes apart; return the bytes of its manifests."""
    import ckstore
    from ckstore.format.manifest import build_manifest, encode_manifest

    state = {f"layer{index}": np.full(_ELEMENTS, index, dtype=np.float32) for index in range(tensors)}
    with ckstore.open(place, policy=ckstore.Policy(compression="fast")) as store:
        store.commit(state, 0, metrics={"loss": 9.0})
        template = store._repository.manifests.load(store._repository.manifests.listing().names[0])
    chunks, frames, packs = list(template.chunks), list(template.frames), list(template.packs)
    located = {frame.chunk_id: (packs[frame.pack], frame) for frame in frames}
    nbytes = 0
    for step in range(1, count):
        own = [(step * changed + index) % len(chunks) for index in range(changed)]
        pack = _new_pack(place, len(own), template.packs[0])
        for number, index in enumerate(own):
            chunks[index] = replace(chunks[index], chunk_id=os.urandom(32))
            frame = replace(
                frames[0], chunk_id=chunks[index].chunk_id, offset=_offset(number), stored_nbytes=_STORED_NBYTES
            )
            located[chunks[index].chunk_id] = pack, replace(frame, base=-1, depth=0)
        header = template.header
        manifest = build_manifest(
            store_id=template.store_id, run=header.run, seq=step, step=step, parent=step - 1,
            time_ns=header.time_ns - (count - step) * _STEP_NS, tree=template.tree, tensors=template.tensors,
            storages=template.storages, chunks=chunks, bytes_written=pack.nbytes, chunks_new=changed,
            metrics={"loss": 9.0 / step}, decisions=template.decisions, **_places(located, chunks),
        )  # fmt: skip
        encoded = encode_manifest(manifest)
        nbytes += len(encoded)
        (place / manifest.header.name.path).write_bytes(encoded)
        (place / "claims" / header.run / f"{step:08d}").touch(mode=0o600)
    return nbytes


def _offset(number: int) -> int:
    return 4096 + number * -(-(192 + _STORED_NBYTES) // 64) * 64


def _new_pack(place: Path, frames: int, like: Any) -> Any:
    pack_id = os.urandom(16)
    nbytes = -(-_offset(frames) // 4096) * 4096 + -(-frames * 96 // 4096) * 4096 + 4096
    path = place / "packs" / pack_id[:1].hex() / f"{pack_id.hex()}.pack"
    with path.open("xb") as file:
        file.truncate(nbytes)
    # Old enough that the grace period does not protect it.
    os.utime(path, ns=(10**18, 10**18))
    return replace(like, pack_id=pack_id, nbytes=nbytes)


def _places(located: dict[bytes, tuple[Any, Any]], chunks: list[Any]) -> dict[str, Any]:
    """Return packs and frames as a manifest lists them."""
    packs: dict[bytes, tuple[int, Any]] = {}
    frames = []
    for chunk in chunks:
        pack, frame = located[chunk.chunk_id]
        number, _ = packs.setdefault(pack.pack_id, (len(packs), pack))
        frames.append(replace(frame, pack=number))
    return {"packs": [pack for _, pack in packs.values()], "frames": frames}
