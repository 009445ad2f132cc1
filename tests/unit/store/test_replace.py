"""Protects Replace: the next generation is published first, and lower ones go only when nothing speaks against it."""

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
    """The parts of a store with one checkpoint, seq 0."""
    store.commit({"a": 1, "b": bytes(100)}, 5)
    return repository_of(store)


@pytest.fixture
def next_one(repository):
    """The manifest of that checkpoint in its next generation."""
    manifest = repository.manifests.load(repository.manifests.listing().names[0])
    return replace(manifest, header=replace(manifest.header, generation=1))


def generations(repository):
    listing = repository.manifests.listing()
    return [name.generation for name in (*listing.names, *listing.lower)]


def test_settled_replacement_is_the_only_generation_in_place(repository, next_one, backend):
    name = repository.manifests.publish(next_one)
    assert generations(repository) == [1, 0], "both are there until all packs were seen"
    finish_replacement(repository, next_one, name)
    assert generations(repository) == [1]
    (gc_id,) = repository.trash.folders()
    assert backend.list_names(paths.trash_manifests_folder(gc_id, "main")) == ["00000000-000000000005.0.ckm"]


def test_second_replacement_of_the_same_generation_is_a_conflict(repository, next_one):
    repository.manifests.publish(next_one)
    other = replace(next_one, header=replace(next_one.header, bytes_written=1))
    with pytest.raises(ConflictError):
        repository.manifests.publish(other)


def test_replacement_of_a_dropped_checkpoint_is_withdrawn(repository, next_one):
    name = repository.manifests.publish(next_one)
    mark_dropped(repository, 0)
    with pytest.raises(NotFoundError, match="dropped"):
        finish_replacement(repository, next_one, name)
    listing = repository.manifests.listing()
    assert listing.lower == (name_of(next_one, 0),), "what the drop moves is still there to be moved"
    assert listing.names == ()


def name_of(manifest, generation):
    header = manifest.header
    return paths.ManifestName(header.run, header.seq, header.step, generation)


def test_replacement_whose_packs_are_gone_leaves_the_one_before(repository, backend, store):
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


def test_interrupted_replacement_is_finished_by_the_next_one(repository, next_one):
    repository.manifests.publish(next_one)
    assert finish_interrupted_replacements(repository) == 1
    assert generations(repository) == [1]
    assert finish_interrupted_replacements(repository) == 0
