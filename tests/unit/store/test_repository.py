"""Protects opening and creating stores, and step 9 of a commit: packs that a collector moved or removed meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, MissingChunkError, NotFoundError, UnsupportedError, UsageError
from ckstore.format import paths
from ckstore.format.records import StoreRecord, encode_record
from ckstore.io.memory import MemoryBackend
from support.memory_files import names_of, truncate
from support.model import difference

GC_ID = "ab" * 16


class WatchedBackend(MemoryBackend):
    """Call a function when a manifest is published."""

    def __init__(self):
        super().__init__()
        self.on_publish = []

    def link(self, source, target):
        super().link(source, target)
        if target.startswith("manifests/") and self.on_publish:
            self.on_publish.pop(0)()


def packs_of(backend):
    return names_of(backend, "packs/")


def collect(backend, name):
    """Move a pack to the trash, as a collector does."""
    folder = paths.trash_packs_folder(GC_ID)
    backend.make_folder(folder)
    backend.rename_new(name, f"{folder}/{name.rsplit('/', 1)[1]}")


@pytest.fixture
def backend():
    return WatchedBackend()


@pytest.fixture
def first(store, backend):
    """The pack of a first commit. The next commit reuses its large tensor."""
    store.commit(STATES[0], 1)
    (name,) = packs_of(backend)
    return name


W = np.arange(100_000.0)
STATES = [{"w": W, "n": np.zeros(3)}, {"w": W, "n": np.ones(3)}]


def test_pack_collected_before_publish_is_rescued(store, backend, first):
    backend.on_publish = [lambda: collect(backend, first)]
    receipt = store.commit(STATES[1], 2)
    assert receipt.chunks_reused == 1
    assert receipt.seq == 1
    assert first in packs_of(backend)
    assert backend.list_names(paths.trash_packs_folder(GC_ID)) == []
    assert backend.syncs[first.rsplit("/", 1)[0]] >= 2, "the folder of the rescued pack is synced"
    assert backend.syncs[paths.trash_packs_folder(GC_ID)] == 1
    assert difference(store.restore(2), STATES[1]) is None
    assert store.verify("decode").is_clean


def test_collected_new_pack_is_rescued(store, backend):
    backend.on_publish = [lambda: [collect(backend, name) for name in packs_of(backend)]]
    store.commit(STATES[0], 1)
    assert len(packs_of(backend)) == 1
    assert difference(store.restore(), STATES[0]) is None


def test_commit_with_lost_pack_is_withdrawn_and_retried(store, backend, first):
    backend.on_publish = [lambda: backend.unlink(first)]
    receipt = store.commit(STATES[1], 2)
    assert receipt.seq == 2, "the withdrawn seq is never used again"
    assert receipt.chunks_reused == 0
    assert receipt.chunks_new == 2
    assert [entry.seq for entry in store.log()] == [2, 0]
    assert difference(store.restore(), STATES[1]) is None
    assert store.verify("decode", ref="latest").is_clean
    assert any(name.endswith(".ckm") for name in backend.list_names("tmp"))


def test_packs_that_vanish_twice_are_a_conflict(store, backend, first):
    def remove_all():
        for name in packs_of(backend):
            backend.unlink(name)

    backend.on_publish = [remove_all, remove_all]
    with pytest.raises(ConflictError, match="vanished twice"):
        store.commit(STATES[1], 2)
    assert [entry.seq for entry in store.log()] == [0]
    receipt = store.commit(STATES[1], 2)
    assert difference(store.restore(f"seq:{receipt.seq}"), STATES[1]) is None


def test_missing_indexed_pack_is_not_reused(store, backend, first):
    backend.unlink(first)
    receipt = store.commit(STATES[0], 2)
    assert receipt.chunks_reused == 0
    assert receipt.seq == 1, "nothing had to be withdrawn"
    assert difference(store.restore(), STATES[0]) is None


def test_indexed_pack_of_wrong_size_is_not_reused(store, backend, first):
    truncate(backend, first, -4096)
    assert store.commit(STATES[0], 2).chunks_reused == 0
    assert difference(store.restore(), STATES[0]) is None


def test_rewind_rescues_collected_packs(store, backend, first):
    backend.on_publish = [lambda: collect(backend, first)]
    store.rewind(1)
    assert first in packs_of(backend)
    assert store.verify("decode").is_clean


def test_rewind_whose_packs_vanish_is_withdrawn(store, backend, first):
    backend.on_publish = [lambda: backend.unlink(first)]
    with pytest.raises(ConflictError, match="vanished"):
        store.rewind(1)
    assert [entry.seq for entry in store.log()] == [0]


def test_restore_reads_packs_in_the_trash(store, backend, first):
    collect(backend, first)
    assert difference(store.restore(), STATES[0]) is None
    assert difference(store.restore(1), STATES[0]) is None
    assert first not in packs_of(backend), "reading moves nothing"


def test_missing_pack_is_named_by_restore(store, backend, first):
    backend.unlink(first)
    with pytest.raises(MissingChunkError) as caught:
        store.restore(1)
    assert caught.value.pack_id == first.rsplit("/", 1)[1].removesuffix(".pack")
    assert caught.value.pack_id in str(caught.value)


# Opening and creating


def test_new_store_syncs_every_folder(backend):
    ckstore.open(backend).close()
    assert {name for name in backend.folders() if "/" not in name} == {"", *paths.TOP_FOLDERS}
    assert len(backend.list_names("packs")) == 256
    for folder in ("", *paths.TOP_FOLDERS, *paths.pack_folders()):
        assert backend.syncs[folder] >= 1, folder
    assert backend.list_names("tmp") == []


def test_store_keeps_its_id(backend):
    first = repository_of(ckstore.open(backend)).store_id
    assert repository_of(ckstore.open(backend)).store_id == first
    assert repository_of(ckstore.open(backend, create=False)).store_id == first


def test_concurrent_creation_makes_one_store(backend, monkeypatch):
    link = backend.link

    def other_was_first(source, target):
        if target == "store.json" and backend.stat(target) is None:
            monkeypatch.undo()
            other.append(repository_of(ckstore.open(backend)).store_id)
        link(source, target)

    other = []
    monkeypatch.setattr(backend, "link", other_was_first)
    mine = repository_of(ckstore.open(backend)).store_id
    assert other == [mine]


def test_interrupted_creation_is_completed(backend):
    for folder in paths.TOP_FOLDERS[4:]:
        backend.make_folder(folder)
    backend.create("tmp/" + "ab" * 16 + ".store", b"torn", sync=False)
    with ckstore.open(backend) as store:
        store.commit({"a": 1}, 1)


def test_missing_store_is_not_found_without_create(backend, tmp_path):
    with pytest.raises(NotFoundError, match="no store here"):
        ckstore.open(backend, create=False)
    assert backend.files() == {}
    with pytest.raises(NotFoundError):
        ckstore.open(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        ckstore.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for create in (True, False):
        with pytest.raises(ckstore.CkstoreError):
            ckstore.open(tmp_path / "file", create=create)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("run", ["../evil", "a/b", "", ".", "..", "-x", "a..b", "x" * 129, "ü", "a\nb", 7, None])
def test_run_names_with_path_parts_are_refused(backend, run):
    with pytest.raises(UsageError):
        ckstore.open(backend, run=run)
    assert all(".." not in name for name in backend.files())


def store_json(**facts):
    record = {
        "store_id": "ab" * 16,
        "created_ns": 1,
        "chunk_nbytes_max": 1 << 22,
        "pack_nbytes_max": 1 << 36,
        "manifest_nbytes_max": 1 << 30,
        "depth_max": 64,
        **facts,
    }
    return encode_record(StoreRecord(**record))


@pytest.mark.parametrize(
    "facts", [{"format_version": 255}, {"mandatory_features": ("erasure-codes",)}, {"hash_name": "blake4"}], ids=str
)
def test_newer_format_is_refused_with_advice(backend, facts):
    backend.create("store.json", store_json(**facts), sync=True)
    with pytest.raises(UnsupportedError) as caught:
        ckstore.open(backend)
    assert caught.value.exit_code == 13
    assert "upgrade" in str(caught.value).lower()


def test_unknown_optional_feature_is_accepted(backend):
    backend.create("store.json", store_json(optional_features=("colours",)), sync=True)
    ckstore.open(backend).close()


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"[" * 100_000, store_json()[:-40], b"x" * (2 << 20)])
def test_damaged_store_file_is_refused_unchanged(backend, content):
    backend.create("store.json", content, sync=True)
    with pytest.raises(CorruptError):
        ckstore.open(backend)
    assert backend.files()["store.json"] == content


def test_file_system_without_exclusive_links_is_refused(backend, monkeypatch):
    monkeypatch.setattr(backend, "link", lambda source, target: None)
    with pytest.raises(UnsupportedError, match="a link replaces an existing file"):
        ckstore.open(backend)
    assert backend.stat("store.json") is None
