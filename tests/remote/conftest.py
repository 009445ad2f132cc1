"""A real S3 server on the loopback, an empty prefix of a bucket, and a client without patience."""

from __future__ import annotations

import pytest

from ckstore.io import remote
from ckstore.io.remote_options import RemoteOptions
from ckstore.testing.fault_proxy import fault_proxy
from ckstore.testing.s3_server import s3_server


@pytest.fixture(scope="session")
def server():
    """A server that runs, with its variables in the environment."""
    with s3_server() as running, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def address(server, monkeypatch):
    """An empty prefix, for clients that do not wait long."""
    options = RemoteOptions(try_count=3, pause_seconds=0.01, pause_seconds_max=0.05, read_timeout_seconds=5)
    monkeypatch.setattr(remote, "DEFAULT_OPTIONS", options)
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
def hasty(monkeypatch):
    """Clients that soon lose patience, for tests of servers that do not answer."""
    options = RemoteOptions(
        try_count=2, pause_seconds=0.005, pause_seconds_max=0.02, read_timeout_seconds=0.6, connect_timeout_seconds=2
    )
    monkeypatch.setattr(remote, "DEFAULT_OPTIONS", options)
