"""Journals in small stores: a run's journal, records with real frames, and what a reader finds."""

from __future__ import annotations

import ckstore
from ckstore._testing import repository_of
from ckstore.clock import SYSTEM_CLOCK
from ckstore.format import paths
from ckstore.format.frame import FrameHeader, encode_frame_header
from ckstore.format.journal import check_record, read_body
from ckstore.format.paths import ManifestName
from ckstore.format.wire import xxh3_64
from ckstore.hashing import NO_BASE, chunk_id_of
from ckstore.store.journals import Journals
from ckstore.store.manifests import Manifests

STRUCTURE = b"s" * 16


def make_store(backend):
    """Make an empty store with the folders of the run ``main``; return the manifests of that run."""
    with ckstore.open(backend) as store:
        repository = repository_of(store)
        repository.make_folders()
        return repository.manifests


def manifests_on(manifests, backend):
    """Return the same run of the same store, on another backend."""
    return Manifests(backend, manifests.run, store_id=manifests.store_id, limits=manifests.limits)


def journals_on(manifests, backend=None, clock=SYSTEM_CLOCK):
    return Journals(manifests if backend is None else manifests_on(manifests, backend), clock=clock)


def put_entry(manifests, seq, step=0):
    """Put an empty manifest: its name is enough for a listing."""
    manifests.backend.create(ManifestName(manifests.run, seq, step, 0).path, b"", sync=False)


def frame_of(payload):
    header = FrameHeader(chunk_id_of(payload), NO_BASE, len(payload), len(payload), 1, (), xxh3_64(payload))
    content = encode_frame_header(header) + payload
    return content.ljust(-(-len(content) // 64) * 64, b"\0")


def append(writer, step, *, payloads=(b"x" * 100,), structure=STRUCTURE, body=None):
    """Append a record of this step; return its head."""
    body = f"body of step {step}".encode() if body is None else body
    frames = [part for payload in payloads for part in halves(frame_of(payload))]
    return writer.append(step=step, time_ns=step, body=body, structure=structure, frames=frames)


def write(journals, steps, *, previous=None):
    """Write a segment with a record for each step; return its name and its last record."""
    writer = journals.open_writer(previous=previous)
    for step in steps:
        append(writer, step)
    writer.close()
    return writer.name, writer.last


def halves(content):
    middle = len(content) // 3
    return content[:middle], content[middle:]


def steps_of(journal, name):
    """Return the steps of a segment's whole records, each checked byte by byte."""
    file = journal.open_segment(name)
    found = []
    for record in journal.records(name).records:
        check_record(file.read_at, record.placed)
        assert read_body(file.read_at, record.placed) == f"body of step {record.head.step}".encode()
        found.append(record.head.step)
    file.close()
    return found


def chain_of(journal, record):
    """Return the steps of a chain, the newest first."""
    return [each.head.step for each in journal.backwards(record)]


def path_of(backend, name):
    return backend.location_of(name.path)


FOLDER = f"{paths.JOURNALS_FOLDER}/main"
