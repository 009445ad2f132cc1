"""Protects store addresses: a mistyped one never becomes a folder, and no message shows a secret in it."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import BackendError, CkstoreError, NotFoundError, UnsupportedError, UsageError, redacted
from ckstore.io.memory import MemoryBackend
from ckstore.io.url import backend_for

MISTYPED = [
    "s3:bucket/x", "s3:/bucket/x", "s3//bucket/x", "S3://bucket/x", "gs:/bucket", "az//container/x",
    "https://account.blob.core.windows.net/container/x", "abfss://c@a.dfs.core.windows.net/x", "hdfs://node/x",
    "file:/tmp/x", "gcs://bucket/x", "ssh:host/x", "https:/bucket/x",
]  # fmt: skip

SECRETS = {
    "https://account.blob.core.windows.net/c/x?sv=2022&sig=HUSH%2Fa": "https://account.blob.core.windows.net/c/x?...",
    "s3://KEY:HUSH@bucket/x": "s3://...@bucket/x",
    "s3://KEY:HU/SH@bucket/x?token=HUSH": "s3://...@bucket/x?...",
    "https://user:HUSH@host:9000/x": "https://...@host:9000/x",
    "s3://bucket/x?X-Amz-Signature=HUSH&X-Amz-Credential=HUSH": "s3://bucket/x?...",
    "account.blob.core.windows.net/c?sv=2022&sig=HUSH&se=1": "account.blob.core.windows.net/c?sv=2022&sig=...&se=1",
    "/disk/x?token=HUSH": "/disk/x?token=...",
}


# A path keeps one of two slashes, and what remains of some addresses is a valid folder name.
MISTYPED_PATHS = [text for text in MISTYPED if not str(Path(text)).startswith(("s3/", "az/"))]


@pytest.mark.parametrize(
    ("kind", "text"), [*((str, text) for text in MISTYPED), *((Path, text) for text in MISTYPED_PATHS)]
)
def test_mistyped_address_is_not_a_folder(tmp_path, monkeypatch, text, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError, match=r"s3://bucket/prefix \(or gs, az\)"):
        ckstore.open(kind(text))
    with ckstore.open(MemoryBackend()) as store, pytest.raises(UnsupportedError):
        store.mirror(os.fspath(kind(text)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["runs/exp:3", "./s3:bucket", "2026-11-28T12:00:00", "a:b", "/s3:/x", "file:///x"])
def test_folder_names_may_contain_colons(text):
    assert Path(backend_for(text).root) == Path(text.removeprefix("file://")).absolute()


@pytest.mark.parametrize(("text", "shown"), SECRETS.items())
def test_errors_show_addresses_without_secrets(text, shown):
    assert redacted(text) == shown
    error = BackendError(f"cannot reach {text}", where=text, todo=f"try {text} again")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert "HUSH" not in f"{each} {each!r} {each.what} {each.where} {each.todo}"
        assert shown in str(each)


@pytest.mark.parametrize("text", SECRETS)
def test_no_verb_shows_a_secret(tmp_path, monkeypatch, caplog, text):
    monkeypatch.chdir(tmp_path)
    store = ckstore.open(MemoryBackend())
    store.commit({"x": 1}, 1)
    calls = [
        lambda: ckstore.open(text, create=False),
        lambda: store.push(text),
        lambda: store.mirror(text, dry_run=True),
        lambda: store.repair(sources=[text]),
    ]
    with caplog.at_level(logging.DEBUG, "ckstore"):
        for call in calls:
            try:
                call()
            except (CkstoreError, NotFoundError, UsageError) as error:
                said = f"{error} {error.facts}"
                caplog.messages.append(said)
    store.close()
    assert "HUSH" not in " ".join(caplog.messages)


def test_address_without_secret_is_unchanged():
    for text in ("s3://bucket/prefix/run", "step=3 of run='main'", "keep_last=3", "/disk/@home/x", "a@b"):
        assert redacted(text) == text
