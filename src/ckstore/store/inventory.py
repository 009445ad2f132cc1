"""What lies in a place, of all runs at once: manifests, drop marks, packs.

Far away a listing costs as much as reading a file, however many names it shows: there it goes through all folders below
one in a single request for a thousand names.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.ids import PackId
from ckstore.io.backend import Backend, Distant, FileInfo


def manifests_in(backend: Backend) -> set[ManifestName]:
    """Return the names of all manifests in place, of every run and generation.

    One listing may show neither of two names of which one is made and the other moved meanwhile: to be asked twice,
    where others replace.
    """
    found = (layout.parse_manifest_file(run, file) for run, file in _files_by_run(backend, layout.MANIFESTS_FOLDER))
    return {name for name in found if name is not None}


def marks_in(backend: Backend) -> tuple[dict[str, frozenset[int]], dict[str, frozenset[int]]]:
    """Return the seqs that carry a drop mark, and those with a mark that they were published, each by run.

    A run of which no manifest is left may have some, too.
    """
    found: dict[str, dict[str, set[int]]] = {"dropped": {}, "published": {}}
    for run, file in _files_by_run(backend, layout.CLAIMS_FOLDER):
        claim = layout.parse_claim_file(file)
        if claim is not None and claim.kind in found:
            found[claim.kind].setdefault(run, set()).add(claim.seq)
    dropped, published = ({run: frozenset(seqs) for run, seqs in kind.items()} for kind in found.values())
    return dropped, published


def packs_in(backend: Backend) -> Iterator[tuple[PackId, FileInfo]]:
    """Yield the packs that lie under their own name."""
    for name, info in _files_of_packs(backend):
        pack_id = layout.parse_pack_file(name.rpartition("/")[2])
        if pack_id is not None and layout.pack_name(pack_id) == name:
            yield pack_id, info


def _files_by_run(backend: Backend, above: str) -> Iterator[tuple[str, str]]:
    """Yield run and file of what lies in folders that are named as runs."""
    if isinstance(backend, Distant):
        for path, _ in backend.list_deep(above):
            run, _, file = path.removeprefix(f"{above}/").partition("/")
            if layout.is_name(run):
                yield run, file
        return
    for run in filter(layout.is_name, backend.list_names(above)):
        for file in backend.list_names(f"{above}/{run}"):
            yield run, file


def _files_of_packs(backend: Backend) -> Iterator[tuple[str, FileInfo]]:
    if isinstance(backend, Distant):
        yield from backend.list_deep(layout.PACKS_FOLDER)
        return
    ours = {folder.rpartition("/")[2] for folder in layout.pack_folders()}
    for folder in backend.list_names(layout.PACKS_FOLDER):
        # What else lies there may be nothing that we are allowed to look into.
        for file in backend.list_names(f"{layout.PACKS_FOLDER}/{folder}") if folder in ours else ():
            name = f"{layout.PACKS_FOLDER}/{folder}/{file}"
            # One that is gone meanwhile is none; what is no pack is not asked about.
            info = backend.stat(name) if layout.parse_pack_file(file) is not None else None
            if info is not None:
                yield name, info
