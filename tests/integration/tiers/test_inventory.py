"""Protects what lies in a place from being listed differently near and far, and a look from costing a listing a run."""

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
"""Names of others, which stand for nothing."""


def test_near_and_far_the_same_manifests_marks_and_packs_are_listed_and_nothing_odd(place):
    backend = backend_for(place)
    for name in (*NAMES, *ODD):
        backend.make_folder(name.rpartition("/")[0])
        backend.create(name, b"x", sync=True)
    assert {name.path for name in manifests_in(backend)} == set(NAMES[:3])
    assert marks_in(backend)[0] == {"main": frozenset({0}), "gone": frozenset({1})}
    assert [(pack_id, info.nbytes) for pack_id, info in packs_in(backend)] == [(PACK, 1)]


def test_an_empty_place_holds_nothing(place):
    backend = backend_for(place)
    assert (manifests_in(backend), marks_in(backend), list(packs_in(backend))) == (set(), ({}, {}), [])


@pytest.mark.parametrize("odd", ["x//y", "../z", "./z", "x%01y"])
def test_a_name_that_no_file_could_have_is_an_error_that_says_so_at_once(odd, server, proxy):
    address = server.new_address()
    bucket, prefix = address.removeprefix("s3://").split("/")
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc)
    # No client of ours makes such a name.
    connection.request("PUT", f"/{bucket}/{prefix}/manifests/{odd}", body=b"1")
    assert connection.getresponse().status == 200
    connection.close()
    backend = backend_for(address)
    proxy.begin()
    with pytest.raises(BackendError, match=r"an object there has a name with an empty part.*remove it"):
        manifests_in(backend)
    assert len(proxy.seen) == 1, "it is not asked again and again"


# A look at all manifests of a bucket


def marker_of(address):
    with ckstore.open(address, create=False) as store:
        return Marker(repository_of(store))


def commit_to(address, *runs):
    for run in runs:
        with ckstore.open(address, run=run) as store:
            store.commit({"w": np.full(2_000, len(run))}, 1)


@pytest.fixture
def listings(monkeypatch):
    """Every folder that is listed in a bucket from now on, and a place for what is to happen after the nth."""
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


def test_a_look_at_four_runs_lists_as_often_as_at_one(address, listings):
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


def test_what_only_one_of_two_listings_shows_counts(address, listings):
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


def test_a_manifest_that_goes_before_it_is_read_makes_a_look_list_again(address, listings):
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
    # Only the run that has changed is looked at again.
    assert (seen.count("manifests"), seen.count("manifests/main"), seen.count("manifests/other")) == (0, 2, 0)
    # What is dropped is known of each run that was seen.
    assert look.dropped == {"main": frozenset({0}), "other": frozenset()}


def test_manifests_that_never_stay_are_an_error_and_no_empty_look(address, monkeypatch):
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


def test_a_store_is_taken_for_empty_only_when_another_kind_of_listing_says_so(address, monkeypatch):
    commit_to(address, "main", "other")
    marker = marker_of(address)
    deep = Bucket.list_deep
    monkeypatch.setattr(Bucket, "list_deep", lambda self, name: [] if name == "manifests" else deep(self, name))
    assert {name.run for name in marker.mark().manifests} == {"main", "other"}


def test_a_run_that_begins_between_two_listings_is_seen(address, listings):
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


@pytest.mark.parametrize("moment", ["at once", "later"])
def test_a_run_that_was_dropped_whole_leaves_the_trash_for_good(address, moment):
    commit_to(address, "main", "other")
    with ckstore.open(address, create=False) as store:
        assert store.delete(1)
        if moment == "at once":
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
