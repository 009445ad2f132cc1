"""Protects credentials: they come from the standard chain, and are in no file, message, log or listing."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.errors import BackendError, CkstoreError, UnreachableError, UsageError
from ckstore.io.url import backend_for
from support.fault_proxy import FAULTS, LEAK
from support.s3_server import KEY_ID, SECRET

STATE = {"w": np.arange(20_000)}


def assert_no_secret(text):
    if isinstance(text, str):
        text = text.encode()
    assert SECRET.encode() not in text
    assert KEY_ID.encode() not in text


def everything_in(backend, folder=""):
    for name in backend.list_names(folder):
        path = f"{folder}/{name}" if folder else name
        if backend.bucket.head(path) is None:
            yield from everything_in(backend, path)
        else:
            yield path, backend.read_bytes(path, nbytes_max=1 << 30)


def test_credentials_are_stored_nowhere(folder, address, proxy, few_retries, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    output = []
    with ckstore.open(folder) as store:
        store.commit(STATE, 1)
        for fault in (LEAK, *(fault for fault in FAULTS if "silence" not in fault)):
            for number in (0, 3, 6):
                proxy.begin_at(number, fault, is_for_ever=True)
                try:
                    store.push(address, keep_local=0)
                    store.pull()
                except CkstoreError as error:
                    output += [repr(store), repr(error), repr(error.facts), *traceback.format_exception(error)]
        proxy.begin()
        store.push(address, keep_local=0)
        output += [repr(store), repr(store.tiers()), repr(store.info(1)), repr(backend_for(address))]
    assert any("SignatureDoesNotMatch" in each for each in output), "the refusal itself is reported"
    assert_no_secret("".join(output))
    assert_no_secret(caplog.text)
    for path in Path(folder).rglob("*"):
        assert_no_secret(str(path))
        if path.is_file():
            assert_no_secret(path.read_bytes())
    found = dict(everything_in(backend_for(address)))
    assert any(name.endswith(".ckm") for name in found)
    for name, content in found.items():
        assert_no_secret(name)
        assert_no_secret(content)


def test_refusal_names_what_to_check(folder, address, proxy):
    with ckstore.open(folder) as store:
        store.commit(STATE, 1)
        proxy.begin_at(0, LEAK, is_for_ever=True)
        with pytest.raises(BackendError, match="403 SignatureDoesNotMatch") as caught:
            store.push(address, keep_local=0)
        assert not caught.value.is_transient
        assert "credentials" in str(caught.value)
        assert len(proxy.seen) <= 3, "a refusal is not asked again and again"


def test_debug_output_shows_no_credentials(folder, address, proxy):
    with ckstore.open(folder) as store:
        store.commit(STATE, 1)
    proxy.begin_at(0, LEAK, is_for_ever=True)
    done = subprocess.run(
        [sys.executable, "-m", "ckstore", "--debug", "push", str(folder), address, "--keep-local", "0"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 15
    assert b"Traceback" in done.stderr
    assert_no_secret(done.stdout + done.stderr)


@pytest.fixture
def no_keys(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def test_profile_provides_keys(address, proxy, no_keys, monkeypatch):
    (no_keys / "credentials").write_text(f"[attic]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    (no_keys / "config").write_text("[profile attic]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_PROFILE", "attic")
    backend = backend_for(address)
    backend.create("note", b"hello", sync=True)
    assert backend.read_bytes("note", nbytes_max=5) == b"hello"


def test_missing_profile_is_named(address, no_keys, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "atic")
    with pytest.raises(UnreachableError, match="atic"):
        backend_for(address)


def test_missing_credentials_are_reported(address, no_keys, few_retries, monkeypatch):
    # The address that would provide a machine's role does not answer.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BackendError):
        backend_for(address).read_bytes("store.json", nbytes_max=10)


ODD_ENDPOINTS = ["minio:9000", "minio", "http//minio", "http://", "http://minio:99999", "http://a b", "ftp://minio", ""]


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_METADATA_ENDPOINT"])
def test_invalid_endpoint_is_named(name, monkeypatch, tmp_path, capfd):
    with ckstore.open(tmp_path / "store") as store:
        store.commit(STATE, 1)
        for value in filter(None, ODD_ENDPOINTS):
            monkeypatch.setenv(name, value)
            for use in (lambda: backend_for("s3://bucket/run"), lambda: store.push("s3://bucket/run")):
                with pytest.raises(UsageError, match=f"{name}={re.escape(value)}"):
                    use()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("address", "name"), [("gs://bucket/run", "GOOGLE_BASE_URL"), ("az://bucket/run", "AZURE_STORAGE_ENDPOINT")]
)
def test_other_clouds_refuse_invalid_endpoints(address, name, monkeypatch):
    monkeypatch.setenv(name, "127.0.0.1:9")
    with pytest.raises(UsageError, match=f"http:// or https://, as in {name}=http://127.0.0.1:9"):
        backend_for(address)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"])
def test_line_break_in_setting_names_only_the_variable(name, monkeypatch):
    monkeypatch.setenv(name, f"{SECRET}\n")
    with pytest.raises(UsageError, match=name) as caught:
        backend_for("s3://bucket/run")
    assert_no_secret(str(caught.value))


def test_password_in_an_endpoint_is_not_repeated(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{KEY_ID}:{SECRET}@minio:9000")
    with pytest.raises(UsageError, match="AWS_ENDPOINT_URL") as caught:
        backend_for("s3://bucket/run")
    assert_no_secret(str(caught.value))


class PanicException(BaseException):
    """Not a subclass of Exception."""


def test_library_panic_is_a_ckstore_error(address, monkeypatch):
    bucket = backend_for(address).bucket

    def panic(*arguments, **options):
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("obstore.get", panic)
    monkeypatch.setattr("obstore.put", panic)
    calls = (
        lambda: bucket.head("x"),
        lambda: bucket.put_new("x", b""),
        lambda: list(bucket.get_stream("x", 0, 9, piece_nbytes=9)),
    )
    for call in calls:
        with pytest.raises(BackendError, match=r"\(obstore\) crashed"):
            call()
