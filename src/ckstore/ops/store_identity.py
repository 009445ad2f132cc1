"""Make ``store.json`` again from what every manifest and pack contains: the store id."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from ckstore.clock import Clock
from ckstore.config import Limits, is_name
from ckstore.errors import CkstoreError, ConflictError, CorruptError
from ckstore.format import paths
from ckstore.format.header import PREAMBLE_NBYTES, decode_preamble
from ckstore.format.pack import SUPERHEADER_NBYTES, decode_superheader
from ckstore.format.records import FORMAT_VERSION, StoreRecord, encode_record
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, Distant
from ckstore.store.store_config import read_store_record


def record_or_remade(backend: Backend, clock: Clock, sources: Sequence[Backend] = ()) -> tuple[StoreRecord, bool]:
    """Return the record in ``store.json``, or one made again from manifests and packs, and whether it was made again.

    Args:
        backend: The store.
        clock: The time of a new record.
        sources: Copies of the store. If one has the same id, its record is used.

    Raises:
        NotFoundError: There is no store, and no file of one.
        ConflictError: There are manifests or packs of several stores.
        CorruptError: ``store.json`` is damaged, or no manifest and no pack can be read.
    """
    if backend.stat(paths.STORE_FILE) is not None:
        return read_store_record(backend), False
    found = list(_ids_of_manifests(backend)) or list(_ids_of_packs(backend))
    ids = Counter(store_id for store_id, _ in found)
    if not ids:
        # Raises: there is no store, or nothing of it can be read.
        return read_store_record(backend), False
    if len(ids) > 1:
        counted = ", ".join(f"{count} of store {store_id}" for store_id, count in ids.most_common())
        raise ConflictError(
            f"store.json is missing, and there are files of several stores: {counted}",
            where=backend.root,
            todo="move the files of the other stores out of manifests/ and packs/, then run `ckstore repair` again",
        )
    (store_id,) = ids
    for source in sources:
        with contextlib.suppress(CkstoreError):
            record = read_store_record(source)
            if record.store_id == store_id:
                return record, True
    limits = Limits()
    return StoreRecord(
        format_version=min(version for _, version in found),
        store_id=store_id,
        created_ns=clock.now_ns(),
        chunk_nbytes_max=limits.chunk_nbytes_max,
        pack_nbytes_max=limits.pack_nbytes_max,
        manifest_nbytes_max=limits.manifest_nbytes_max,
        depth_max=limits.depth_max,
    ), True


def write_store_record(backend: Backend, record: StoreRecord) -> None:
    """Write ``store.json`` durably, unless another process has written it meanwhile."""
    backend.make_folder(paths.TMP_FOLDER)
    draft = paths.draft_name(new_token(), "store")
    backend.create(draft, encode_record(record), sync=True)
    with contextlib.suppress(FileExistsError):
        backend.link(draft, paths.STORE_FILE)
    backend.sync_folder("")
    backend.unlink(draft)


def _ids_of_manifests(backend: Backend) -> Iterator[tuple[str, int]]:
    """Yield store id and format version of each manifest with a readable beginning."""
    for run in filter(is_name, backend.list_names(paths.MANIFESTS_FOLDER)):
        for file in backend.list_names(paths.manifests_folder(run)):
            name = paths.parse_manifest_file(run, file)
            if name is not None:
                with contextlib.suppress(CorruptError, FileNotFoundError):
                    where = backend.location_of(name.path)
                    preamble = decode_preamble(backend.read_head(name.path, PREAMBLE_NBYTES), where=where)
                    yield preamble.store_id.hex(), preamble.version


def _ids_of_packs(backend: Backend) -> Iterator[tuple[str, int]]:
    if isinstance(backend, Distant):
        return
    for folder in paths.pack_folders():
        for file in backend.list_names(folder):
            pack_id = paths.parse_pack_file(file)
            if pack_id is not None:
                with contextlib.suppress(CorruptError, FileNotFoundError):
                    found = decode_superheader(backend.read_head(f"{folder}/{file}", SUPERHEADER_NBYTES))
                    yield found.store_id.hex(), FORMAT_VERSION
