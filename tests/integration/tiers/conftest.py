"""Fixtures of tier tests: a local S3 server, an empty prefix, clients with short timeouts, and a pushed store."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.io.remote import client
from ckstore.io.remote.client import RemoteOptions
from support.fault_proxy import fault_proxy
from support.memory_folders import tmp_path as tmp_path
from support.push_states import state_of
from support.s3_server import s3_server_in_environment


@pytest.fixture(scope="session")
def server():
    """A running server, with its variables in the environment."""
    with s3_server_in_environment() as running:
        yield running


@pytest.fixture
def address(server, monkeypatch):
    """An empty prefix, with clients that retry quickly but wait long for answers, because the machine may be busy."""
    options = RemoteOptions(try_count=3, pause_seconds=0.01, pause_seconds_max=0.05)
    monkeypatch.setattr(client, "DEFAULT_OPTIONS", options)
    return server.new_address()


@pytest.fixture(scope="session")
def proxy_of_server(server):
    """A proxy in front of the server, for tests that break or count requests."""
    with fault_proxy(server.endpoint) as running:
        yield running


@pytest.fixture
def proxy(proxy_of_server, address, monkeypatch):
    """The proxy, with clients that use it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy_of_server.endpoint)
    proxy_of_server.begin()
    yield proxy_of_server
    proxy_of_server.begin()


@pytest.fixture
def past_proxy(proxy, server, monkeypatch):
    """Clients of this process that bypass the proxy, where only some are to use it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)


@pytest.fixture
def few_retries(monkeypatch):
    """Clients that try only twice, for tests of failing servers."""
    options = RemoteOptions(try_count=2, pause_seconds=0.005, pause_seconds_max=0.02)
    monkeypatch.setattr(client, "DEFAULT_OPTIONS", options)


@pytest.fixture(params=["bucket", "folder"])
def place(request, tmp_path, address):
    """A location for a copy: an empty prefix, or a folder that does not exist."""
    return address if request.param == "bucket" else str(tmp_path / "attic")


@pytest.fixture
def pushed(folder, place):
    """A store of three checkpoints, the older two pushed to that location; local packs are not freed yet."""
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        yield store
