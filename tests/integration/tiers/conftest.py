"""A real S3 server on the loopback, an empty prefix of a bucket, a client without patience, and a store with a copy."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.io.remote import client
from ckstore.io.remote.client import RemoteOptions
from support.fault_proxy import fault_proxy
from support.memory_folders import tmp_path as tmp_path
from support.push_states import state_of
from support.s3_server import s3_server


@pytest.fixture(scope="session")
def server():
    """A server that runs, with its variables in the environment."""
    with s3_server() as running, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def address(server, monkeypatch):
    """An empty prefix, for clients that pause for moments; for answers they wait as long as a busy machine needs."""
    options = RemoteOptions(try_count=3, pause_seconds=0.01, pause_seconds_max=0.05)
    monkeypatch.setattr(client, "DEFAULT_OPTIONS", options)
    return server.new_address()


@pytest.fixture(scope="session")
def proxy_of_server(server):
    """A proxy before the server; for tests that break requests, or count them."""
    with fault_proxy(server.endpoint) as running:
        yield running


@pytest.fixture
def proxy(proxy_of_server, address, monkeypatch):
    """The proxy, with clients that go through it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy_of_server.endpoint)
    proxy_of_server.begin()
    yield proxy_of_server
    proxy_of_server.begin()


@pytest.fixture
def past_proxy(proxy, server, monkeypatch):
    """Clients of this process that go straight to the server, where only some are to go through the proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)


@pytest.fixture
def hasty(monkeypatch):
    """Clients that try twice only, for tests of servers that fail."""
    options = RemoteOptions(try_count=2, pause_seconds=0.005, pause_seconds_max=0.02)
    monkeypatch.setattr(client, "DEFAULT_OPTIONS", options)


@pytest.fixture(params=["bucket", "folder"])
def place(request, tmp_path, address):
    """Where a store may be copied to: an empty prefix, or a folder that is not there."""
    return address if request.param == "bucket" else str(tmp_path / "attic")


@pytest.fixture
def pushed(folder, place):
    """A store of three checkpoints, of which the older two were pushed there; packs here are not freed yet."""
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
        store.push(place, keep_local=1)
        yield store
