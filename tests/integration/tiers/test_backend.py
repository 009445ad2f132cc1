"""Protects the backend contract for buckets: the same test suite as for memory and folders, with a server."""

from __future__ import annotations

import pytest

from ckstore.errors import BackendError, MissingChunkError, UnreachableError, UsageError
from ckstore.format.records import ConfigRecord
from ckstore.io.backend import ReadRequest
from ckstore.io.buffers import BufferPool
from ckstore.io.remote import client
from ckstore.io.remote.backend import RemoteBackend
from ckstore.io.url import backend_for
from ckstore.store.store_config import change_config
from support.fault_proxy import fault_proxy
from support.s3_server import s3_server
from support.suites import BLOCK, BackendSuite, write_pack


class TestBucket(BackendSuite):
    @pytest.fixture
    def backend(self, address):
        return RemoteBackend(address)

    def test_missing_names_say_so(self, backend):
        """As elsewhere, except for folders, which a bucket does not have."""
        assert backend.stat("gone") is None
        assert backend.list_names("gone") == []
        for call in (
            lambda: backend.read_bytes("gone", nbytes_max=1),
            lambda: backend.read_head("gone", 1),
            lambda: backend.unlink("gone"),
            lambda: backend.link("gone", "other"),
            lambda: backend.rename("gone", "other"),
            lambda: backend.rename_new("gone", "other"),
            lambda: backend.sync_file("gone"),
            lambda: backend.open_read("gone"),
        ):
            with pytest.raises(FileNotFoundError):
                call()

    def test_folders_are_made_with_parents_and_listed_sorted(self, backend):
        """A folder exists while it contains something."""
        assert backend.make_folder("a/b/c") is False
        backend.create("a/z", b"", sync=False)
        backend.create("a/0", b"", sync=False)
        backend.create("a/b/c/d", b"", sync=False)
        assert backend.list_names("a") == ["0", "b", "z"]
        assert backend.list_names("") == ["a"]
        backend.unlink("a/b/c/d")
        assert backend.list_names("a") == ["0", "z"]

    def test_open_file_outlives_its_name(self, backend):
        """Not in a bucket: reading raises, as damage and not as a missing file."""
        write_pack(backend, "x.pack", [b"gone" * 3000])
        file = backend.open_read("x.pack")
        backend.unlink("x.pack")
        with BufferPool(BLOCK, 2) as pool:
            with pytest.raises(MissingChunkError):
                list(backend.read_ranges([ReadRequest(file, 1, 5000, 0)], pool))
            assert pool.free_count == 2

    def test_drafts_stay_in_memory_until_they_get_a_name(self, backend):
        backend.create("tmp/draft.ckm", b"whole", sync=True)
        assert backend.bucket.list_folder("") == []
        assert backend.list_names("tmp") == ["draft.ckm"]
        assert backend.read_bytes("tmp/draft.ckm", nbytes_max=5) == b"whole"
        backend.link("tmp/draft.ckm", "manifests/main/x")
        backend.unlink("tmp/draft.ckm")
        assert backend.read_bytes("manifests/main/x", nbytes_max=5) == b"whole"
        backend.rename("manifests/main/x", "tmp/withdrawn.ckm")
        assert backend.bucket.list_folder("") == []
        assert backend.read_bytes("tmp/withdrawn.ckm", nbytes_max=5) == b"whole"

    def test_server_supports_conditional_requests(self, backend):
        backend.probe()
        assert backend.honours_conditions()
        assert backend.bucket.list_folder("") == [], "the probe is gone"


def test_addresses_are_normalized(address):
    assert backend_for(f"{address}//deep/").root == f"{address}/deep"


@pytest.mark.parametrize(
    "url", ["s3://key:SECRET@bucket/x", "s3://bucket/x?secret=SECRET", "s3://bucket/x#SECRET", "s3://SECRET@bucket"]
)
def test_address_with_credentials_is_refused(url):
    with pytest.raises(UsageError) as caught:
        backend_for(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://bucket/../x"])
def test_address_without_bucket_is_refused(url):
    with pytest.raises(UsageError):
        backend_for(url)


def test_wrong_bucket_is_named(address):
    backend = RemoteBackend("s3://there-is-no-such-bucket/x")
    for call in (
        lambda: backend.read_bytes("store.json", nbytes_max=100),
        lambda: backend.create("store.json", b"x", sync=True),
        lambda: backend.list_names(""),
    ):
        with pytest.raises(UnreachableError, match="no such bucket"):
            call()


def test_missing_server_is_a_transient_error(address, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    backend = RemoteBackend(address)
    with pytest.raises(BackendError) as caught:
        backend.read_bytes("store.json", nbytes_max=100)
    assert caught.value.is_transient


@pytest.mark.parametrize("is_there", [False, True])
def test_error_with_status_200_is_no_object(proxy, address, is_there):
    """An answer to HEAD has no body, so that an error with status 200 looks like an object of a few bytes, or none."""
    backend = RemoteBackend(address)
    if is_there:
        backend.create("claims/main/00000001", b"ours", sync=True)
    proxy.begin_at(0, "200-error")
    found = backend.stat("claims/main/00000001")
    assert [seen.fault for seen in proxy.seen] == ["200-error", ""], "it is asked again"
    assert (found.nbytes if found else None) == (4 if is_there else None)
    if is_there:
        return
    # A put checks its object afterwards: this check must not report somebody else's object either.
    proxy.begin_at(1, "200-error")
    backend.create("claims/main/00000001", b"ours", sync=True)
    assert [seen.method for seen in proxy.seen[:3]] == ["PUT", "HEAD", "HEAD"]


@pytest.mark.parametrize("is_there", [False, True])
def test_error_with_status_200_is_no_empty_folder(proxy, address, is_there):
    """A trainer would restart a run that seems empty, and a collector would treat its packs as garbage."""
    backend = RemoteBackend(address)
    if is_there:
        backend.create("claims/main/00000001", b"ours", sync=True)
    for number, names in enumerate((["00000001"], ["claims/main/00000001"])):
        proxy.begin_at(0, "200-error")
        found = backend.list_names("claims/main") if number == 0 else [name for name, _ in backend.list_deep("claims")]
        assert [seen.fault for seen in proxy.seen] == ["200-error", ""], "it is asked again"
        assert found == (names if is_there else [])


def test_error_with_status_200_does_not_end_a_listing(monkeypatch):
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    monkeypatch.setattr(client, "_PAGE_COUNT", 3)
    with s3_server() as small, fault_proxy(small.endpoint) as before:
        for name, value in (*small.environment.items(), ("AWS_ENDPOINT_URL", before.endpoint)):
            monkeypatch.setenv(name, value)
        backend = RemoteBackend(small.new_address())
        names = [f"packs/{number}" for number in range(7)]
        for name in names:
            backend.create(name, b"ours", sync=True)
        for listed in (lambda: backend.list_names("packs"), lambda: backend.list_deep("packs")):
            before.begin()
            assert len(listed()) == 7
            assert len(before.seen) == 3, "three pages, and what was not cut is not asked for again"
            for page in range(3):
                before.begin_at(page, "200-error")
                assert len(listed()) == 7


def with_tier(name):
    return lambda record: ConfigRecord(tiers={**record.tiers, name: f"/{name}"})


def test_concurrent_configuration_change_is_kept(address):
    backend, calls = RemoteBackend(address), []

    def change(record):
        calls.append(record)
        if len(calls) in (1, 2):
            # Once when there is no configuration, and once when it is replaced.
            change_config(RemoteBackend(address), with_tier(f"theirs-{len(calls)}"))
        return with_tier("ours")(record)

    assert set(change_config(backend, change).tiers) == {"theirs-1", "theirs-2", "ours"}
    assert len(calls) == 3


def test_stale_configuration_is_not_written(address, monkeypatch):
    backend = RemoteBackend(address)
    backend.create("config.json", b"one", sync=True)
    get = backend.bucket.get

    def replaced_meanwhile(key, *, nbytes_max):
        content = get(key, nbytes_max=nbytes_max)
        backend.bucket.put_over(key, b"two")
        return content

    monkeypatch.setattr(backend.bucket, "get", replaced_meanwhile)
    assert not backend.replace_if("config.json", b"one", b"ours")
    assert get("config.json", nbytes_max=9) == b"two"


@pytest.mark.parametrize("fault", ["500-after", "409", "412", "reset-after", "200-error"])
def test_replacement_without_answer_is_no_conflict(proxy, address, fault):
    backend = RemoteBackend(address)
    backend.create("config.json", b"one", sync=True)
    puts = []

    def first_put(number, method, path):
        puts.extend([number] if method == "PUT" else [])
        return fault if method == "PUT" and len(puts) == 1 else ""

    proxy.begin(first_put)
    assert backend.replace_if("config.json", b"one", b"two")
    assert backend.read_bytes("config.json", nbytes_max=9) == b"two"
