"""Protects listings of a location: local and remote ones agree, and need not one listing per run."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import BackendError, CorruptError
from ckstore.format import paths
from ckstore.hashing import PackId
from ckstore.io.remote.client import Bucket, ObjectInfo
from ckstore.io.url import backend_for
from ckstore.store import reachability
from ckstore.store.listing import manifests_in, marks_in, packs_in
from ckstore.store.reachability import Marker

PACK = PackId(bytes(range(16)))
NAMES = [
    "manifests/main/00000000-000000000001.0.ckm",
    "manifests/main/00000000-000000000001.1.ckm",
    "manifests/other/00000003-000000000009.0.ckm",
    "claims/main/00000000",
    "claims/main/00000000.dropped",
    "claims/other/00000003",
    "claims/gone/00000001.dropped",
    paths.pack_name(PACK),
]
ODD = [
    "manifests/main/nested/00000000-000000000002.0.ckm",
    "manifests/main/00000000-000000000001.0.ckm.bak",
    "manifests/.hidden/00000000-000000000001.0.ckm",
    "claims/main/nested/00000005.dropped",
    "claims/main/5.dropped",
    f"packs/zz/{paths.pack_file(PACK)}",
    "packs/00/notes.txt",
]
"""Names of other programs, which ckstore ignores."""


def test_local_and_remote_listings_agree(place):
    backend = backend_for(place)
    for name in (*NAMES, *ODD):
        backend.make_folder(name.rpartition("/")[0])
        backend.create(name, b"x", sync=True)
    assert {name.path for name in manifests_in(backend)} == set(NAMES[:3])
    assert marks_in(backend)[0] == {"main": frozenset({0}), "gone": frozenset({1})}
    assert [(pack_id, info.nbytes) for pack_id, info in packs_in(backend)] == [(PACK, 1)]


def test_empty_location_lists_nothing(place):
    backend = backend_for(place)
    assert (manifests_in(backend), marks_in(backend), list(packs_in(backend))) == (set(), ({}, {}), [])


@pytest.mark.parametrize("odd", ["x//y", "../z", "./z", "x%01y"])
def test_impossible_name_is_an_error(odd, server, proxy):
    address = server.new_address()
    bucket, prefix = address.removeprefix("s3://").split("/")
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc)
    # ckstore never makes such a name.
    connection.request("PUT", f"/{bucket}/{prefix}/manifests/{odd}", body=b"1")
    assert connection.getresponse().status == 200
    connection.close()
    backend = backend_for(address)
    proxy.begin()
    with pytest.raises(BackendError, match=r"an object there has a name with an empty part.*remove it"):
        manifests_in(backend)
    assert len(proxy.seen) == 1, "it is not asked again and again"


# Listing all manifests of a bucket


def marker_of(address):
    with ckstore.open(address, create=False) as store:
        return Marker(repository_of(store))


def commit_to(address, *runs):
    for run in runs:
        with ckstore.open(address, run=run) as store:
            store.commit({"w": np.full(2_000, len(run))}, 1)


@pytest.fixture
def listings(monkeypatch):
    """Every folder of a bucket that is listed from now on, and a hook after the nth listing."""
    seen, after = [], {}

    def note(name):
        inner = getattr(Bucket, name)

        def listed(self, folder):
            found = inner(self, folder)
            seen.append(folder)
            return after.get(len(seen), lambda found: found)(found)

        monkeypatch.setattr(Bucket, name, listed)

    note("list_folder")
    note("list_deep")
    return seen, after


def test_number_of_listings_is_independent_of_runs(address, listings):
    seen, _ = listings
    commit_to(address, "main")
    marker = marker_of(address)
    seen.clear()
    assert {name.run for name in marker.mark().manifests} == {"main"}
    first = list(seen)
    commit_to(address, "a", "b", "c")
    seen.clear()
    assert {name.run for name in marker.mark().manifests} == {"a", "b", "c", "main"}
    assert seen == first == ["manifests", "manifests", "claims", "quarantine/manifests"]


def test_entries_of_either_listing_count(address, listings):
    seen, after = listings
    commit_to(address, "main", "other")
    marker = marker_of(address)
    for blind in (1, 2):
        seen.clear()
        after[blind] = lambda found: []
        look = marker.mark()
        assert {name.run for name in look.manifests} == {"main", "other"}
        assert set(look.dropped) == {"main", "other"}
        after.clear()


def test_vanished_manifest_causes_a_new_listing(address, listings):
    seen, after = listings
    commit_to(address, "main", "other")
    marker = marker_of(address)
    with ckstore.open(address, run="main", create=False) as store:

        def delete(found):
            after.clear()
            store.delete(1)
            seen.clear()
            return found

        seen.clear()
        after[2] = delete
        look = marker.mark()
    assert {name.run for name in look.manifests} == {"other"}
    # Only the run that has changed is listed again.
    assert (seen.count("manifests"), seen.count("manifests/main"), seen.count("manifests/other")) == (0, 2, 0)
    # The dropped checkpoints of each listed run are known.
    assert look.dropped == {"main": frozenset({0}), "other": frozenset()}


def test_ever_changing_manifests_are_an_error(address, monkeypatch):
    monkeypatch.setattr(reachability, "_LISTINGS_MAX", 3)
    commit_to(address, "main")
    marker = marker_of(address)
    ghost = "00000007-000000000007.1.ckm"
    folder, deep = Bucket.list_folder, Bucket.list_deep
    monkeypatch.setattr(Bucket, "list_folder", lambda self, name: [*folder(self, name), ghost])
    info = ObjectInfo(1, 1, "", "")
    monkeypatch.setattr(Bucket, "list_deep", lambda self, name: [*deep(self, name), (f"manifests/main/{ghost}", info)])
    with pytest.raises(CorruptError, match="of run 'main' keep vanishing"):
        marker.mark()


def test_empty_store_is_confirmed_by_other_listing(address, monkeypatch):
    commit_to(address, "main", "other")
    marker = marker_of(address)
    deep = Bucket.list_deep
    monkeypatch.setattr(Bucket, "list_deep", lambda self, name: [] if name == "manifests" else deep(self, name))
    assert {name.run for name in marker.mark().manifests} == {"main", "other"}


def test_run_created_between_listings_is_seen(address, listings):
    seen, after = listings
    commit_to(address, "main")
    marker = marker_of(address)

    def commit_more(found):
        after.clear()
        commit_to(address, "late")
        return found

    seen.clear()
    after[1] = commit_more
    assert {name.run for name in marker.mark().manifests} == {"main", "late"}


@pytest.mark.parametrize("moment", ["immediately", "later"])
def test_fully_dropped_run_leaves_the_trash(address, moment):
    commit_to(address, "main", "other")
    with ckstore.open(address, create=False) as store:
        assert store.delete(1)
        if moment == "immediately":
            assert store.gc(now=True, min_age=0).done.rescued == 0
        else:
            assert store.gc().done.rescued == 0
            assert store.gc(now=True, min_age=0).done.rescued == 0
        assert store.gc(now=True, min_age=0, dry_run=True).plan.moves == ()
        packs = {pack_id.hex() for pack_id, _ in packs_in(backend_for(address))}
        assert manifests_in(backend_for(address)) == {paths.ManifestName("other", 0, 1, 0)}
        trashed = [name for name, _ in backend_for(address).list_deep("trash") if name.endswith((".ckm", ".pack"))]
        assert trashed == []
    with ckstore.open(address, run="other", create=False) as store:
        assert packs == {pack.pack_id for pack in store.contents(1).packs}
