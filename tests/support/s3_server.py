"""A real S3 server for tests: moto's, in a process of its own on the loopback, or any other that the environment names.

``CKSTORE_TEST_S3_ENDPOINT`` names another server; then ``CKSTORE_TEST_S3_BUCKET`` is a bucket there, and the usual
variables hold its credentials.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckstore.hashing import new_token

BUCKET = "ckstore-test"
KEY_ID, SECRET = "AKIACANARYINTHEMINE0", "canary/secret+that/nobody/may/ever/see00"
"""Credentials of the server on the loopback, by which a leak is found."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server that runs.

    Attributes:
        endpoint: Where it listens.
        environment: Variables by which clients find it.
        bucket: The bucket to use there; None: a new one each time, since this server lists slowly what is full.
    """

    endpoint: str
    environment: dict[str, str] = field(repr=False)
    bucket: str | None = None

    def new_address(self) -> str:
        """Return the address of a prefix that nothing lies below."""
        token = new_token()[:12]
        if self.bucket is not None:
            return f"s3://{self.bucket}/test-{token}"
        make_bucket(self.endpoint, f"{BUCKET}-{token}")
        return f"s3://{BUCKET}-{token}/test"


@contextmanager
def s3_server_in_environment() -> Iterator[S3Server]:
    """Run a server until the block ends, with its variables in the environment."""
    with s3_server() as running, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server until the block ends."""
    other = os.environ.get("CKSTORE_TEST_S3_ENDPOINT")
    if other:
        yield S3Server(other, {"AWS_ENDPOINT_URL": other}, os.environ.get("CKSTORE_TEST_S3_BUCKET", BUCKET))
        return
    # It ends with its standard input, so that it does not outlive a test run that is killed.
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("s3_server_process.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None, "it was asked for"
        assert process.stdin is not None, "it was asked for"
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }
        try:
            yield S3Server(endpoint, environment)
        finally:
            process.stdin.close()


def make_bucket(endpoint: str, name: str) -> None:
    """Make a bucket on a server that asks for no signature."""
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")):
        pass
