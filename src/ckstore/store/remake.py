"""Make ``store.json`` again from what repeats it: every manifest and every pack carries the store's id.

A purge by age takes ``store.json`` first, since nothing writes it after it was made. Its limits are those that every
store is made with; what holds less than they allow can be read by them.

Invariants:
- It is made only where all manifests, or where there is none all packs, are of one store; never over one that is there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

from ckstore.clock import Clock
from ckstore.config import Limits
from ckstore.errors import CkstoreError, ConflictError, CorruptError
from ckstore.format import layout
from ckstore.format.header import PREAMBLE_NBYTES, decode_preamble
from ckstore.format.pack import SUPERHEADER_NBYTES, decode_superheader
from ckstore.format.records import StoreRecord, encode_record
from ckstore.format.version import FORMAT_VERSION
from ckstore.ids import new_token
from ckstore.io.backend import Backend, Distant
from ckstore.store.parts import read_store_record


def record_or_remade(backend: Backend, clock: Clock, sources: Sequence[Backend] = ()) -> tuple[StoreRecord, bool]:
    """Return what ``store.json`` says, and whether it is missing and was made up from manifests and packs.

    Args:
        backend: The store.
        clock: Says when the record was made.
        sources: Copies of the store; where one has the same id, what it says is taken.

    Raises:
        NotFoundError: There is no store, and nothing of one.
        ConflictError: Manifests or packs of several stores lie there.
        CorruptError: ``store.json`` is there, and damaged; or none of what is there can be read.
    """
    if backend.stat(layout.STORE_FILE) is not None:
        return read_store_record(backend), False
    found = list(_ids_of_manifests(backend)) or list(_ids_of_packs(backend))
    ids = Counter(store_id for store_id, _ in found)
    if not ids:
        # Says that there is no store, or that nothing of it can be read.
        return read_store_record(backend), False
    if len(ids) > 1:
        counted = ", ".join(f"{count} of store {store_id}" for store_id, count in ids.most_common())
        raise ConflictError(
            f"store.json is missing, and there are files of several stores: {counted}",
            where=backend.root,
            todo="move the files of the other stores out of manifests/ and packs/, then repair again",
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
    """Write ``store.json`` durably, unless somebody else has meanwhile."""
    backend.make_folder(layout.TMP_FOLDER)
    draft = layout.draft_name(new_token(), "store")
    backend.create(draft, encode_record(record), sync=True)
    with contextlib.suppress(FileExistsError):
        backend.link(draft, layout.STORE_FILE)
    backend.sync_folder("")
    backend.unlink(draft)


def _ids_of_manifests(backend: Backend) -> Iterator[tuple[str, int]]:
    """Yield store id and format version of each manifest whose beginning is whole."""
    for run in filter(layout.is_name, backend.list_names(layout.MANIFESTS_FOLDER)):
        for file in backend.list_names(layout.manifests_folder(run)):
            name = layout.parse_manifest_file(run, file)
            if name is not None:
                with contextlib.suppress(CorruptError, FileNotFoundError):
                    where = backend.location_of(name.path)
                    preamble = decode_preamble(backend.read_head(name.path, PREAMBLE_NBYTES), where=where)
                    yield preamble.store_id.hex(), preamble.version


def _ids_of_packs(backend: Backend) -> Iterator[tuple[str, int]]:
    if isinstance(backend, Distant):
        return
    for folder in layout.pack_folders():
        for file in backend.list_names(folder):
            pack_id = layout.parse_pack_file(file)
            if pack_id is not None:
                with contextlib.suppress(CorruptError, FileNotFoundError):
                    found = decode_superheader(backend.read_head(f"{folder}/{file}", SUPERHEADER_NBYTES))
                    yield found.store_id.hex(), FORMAT_VERSION
