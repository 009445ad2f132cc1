"""Protects the order in which bytes and names become durable; leaving out one sync must fail here."""

import pytest

from ckstore.errors import ConflictError, UnsupportedError
from ckstore.io import durable
from ckstore.io.memory import MemoryBackend


class Recorded(MemoryBackend):
    """Writes down what changes and what is synced."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.can_link = True

    def create(self, name, content, *, sync):
        super().create(name, content, sync=sync)
        self.calls.append(f"create {name} {'synced' if sync else ''}".strip())

    def link(self, source, target):
        if not self.can_link:
            raise UnsupportedError("no links")
        super().link(source, target)
        self.calls.append(f"link {source} {target}")

    def rename(self, source, target):
        super().rename(source, target)
        self.calls.append(f"rename {source} {target}")

    def rename_new(self, source, target):
        super().rename_new(source, target)
        self.calls.append(f"rename_new {source} {target}")

    def sync_folder(self, name):
        super().sync_folder(name)
        self.calls.append(f"sync {name or '/'}")


@pytest.fixture
def backend():
    backend = Recorded()
    backend.make_folder("a")
    backend.make_folder("b")
    return backend


def test_create_syncs_bytes_then_name(backend):
    durable.create_synced(backend, "a/x", b"1")
    assert backend.calls == ["create a/x synced", "sync a"]


def test_publish_links_then_syncs_the_folder_of_the_target(backend):
    backend.create("a/draft", b"1", sync=True)
    durable.publish_new(backend, "a/draft", "b/final")
    assert backend.calls[1:] == ["link a/draft b/final", "sync b"]


def test_publish_without_links_renames_and_syncs(backend):
    backend.can_link = False
    backend.create("a/draft", b"1", sync=True)
    durable.publish_new(backend, "a/draft", "b/final")
    assert backend.calls[1:] == ["rename_new a/draft b/final", "sync b"]


def test_repeated_publish_still_syncs(backend):
    backend.create("a/draft", b"1", sync=True)
    backend.create("b/final", b"1", sync=False)
    durable.publish_new(backend, "a/draft", "b/final")
    assert backend.calls[-1] == "sync b"


def test_publish_over_other_bytes_is_a_conflict_that_names_the_file(backend):
    backend.create("a/draft", b"1", sync=True)
    backend.create("b/final", b"2", sync=True)
    with pytest.raises(ConflictError, match="b/final"):
        durable.publish_new(backend, "a/draft", "b/final")


def test_replace_goes_through_a_durable_draft(backend):
    durable.replace_synced(backend, "a/tag", b"1", draft="b/draft")
    assert backend.calls == ["create b/draft synced", "rename b/draft a/tag", "sync a"]


def test_move_syncs_the_new_name_before_the_old_one_is_gone_for_good(backend):
    backend.create("a/x", b"1", sync=True)
    durable.move_synced(backend, "a/x", "b/x")
    assert backend.calls[1:] == ["rename_new a/x b/x", "sync b", "sync a"]


def test_new_folders_are_made_durable_from_the_top(backend):
    durable.make_folder_synced(backend, "a/c/d")
    durable.make_folder_synced(backend, "a/c/d")
    assert backend.calls == ["sync a", "sync a/c"]
