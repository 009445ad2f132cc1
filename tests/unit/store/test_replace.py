"""Protects ``Replace``: the next generation is published first, and lower ones are removed only when that is safe."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, NotFoundError
from ckstore.format import paths
from ckstore.store.repository import finish_interrupted_replacements, finish_replacement
from support.drop_marks import mark_dropped


@pytest.fixture
def repository(store):
    """A store with one checkpoint, seq 0."""
    store.commit({"a": 1, "b": bytes(100)}, 5)
    return repository_of(store)


@pytest.fixture
def next_manifest(repository):
    """The manifest of that checkpoint in its next generation."""
    manifest = repository.manifests.load(repository.manifests.listing().names[0])
    return replace(manifest, header=replace(manifest.header, generation=1))


def generations(repository):
    listing = repository.manifests.listing()
    return [name.generation for name in (*listing.names, *listing.lower)]


def test_settled_replacement_is_the_only_generation(repository, next_manifest, backend):
    name = repository.manifests.publish(next_manifest)
    assert generations(repository) == [1, 0], "both stay until all packs were found"
    finish_replacement(repository, next_manifest, name)
    assert generations(repository) == [1]
    (gc_id,) = repository.trash.folders()
    assert backend.list_names(paths.trash_manifests_folder(gc_id, "main")) == ["00000000-000000000005.0.ckm"]


def test_second_replacement_is_a_conflict(repository, next_manifest):
    repository.manifests.publish(next_manifest)
    other = replace(next_manifest, header=replace(next_manifest.header, bytes_written=1))
    with pytest.raises(ConflictError):
        repository.manifests.publish(other)


def test_replacement_of_dropped_checkpoint_is_withdrawn(repository, next_manifest):
    name = repository.manifests.publish(next_manifest)
    mark_dropped(repository, 0)
    with pytest.raises(NotFoundError, match="deleted"):
        finish_replacement(repository, next_manifest, name)
    listing = repository.manifests.listing()
    assert listing.lower == (name_of(next_manifest, 0),), "the drop must still find its manifest"
    assert listing.names == ()


def name_of(manifest, generation):
    header = manifest.header
    return paths.ManifestName(header.run, header.seq, header.step, generation)


def test_replacement_with_lost_packs_keeps_the_previous(repository, backend, store):
    store.commit({"w": list(range(9)), "x": ckstore.__name__}, 6)
    import numpy as np

    store.commit({"w": np.arange(9.0)}, 7)
    manifest = repository.manifests.load(repository.manifests.listing().names[-1])
    following = replace(manifest, header=replace(manifest.header, generation=1))
    name = repository.manifests.publish(following)
    backend.unlink(paths.pack_name(manifest.packs[0].pack_id))
    with pytest.raises(ConflictError, match="vanished"):
        finish_replacement(repository, following, name)
    assert [n.generation for n in repository.manifests.listing().names if n.seq == name.seq] == [0]


def test_interrupted_replacement_is_completed(repository, next_manifest):
    repository.manifests.publish(next_manifest)
    assert finish_interrupted_replacements(repository) == 1
    assert generations(repository) == [1]
    assert finish_interrupted_replacements(repository) == 0
