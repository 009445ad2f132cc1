"""The bucket backend (S3, GCS, Azure), loaded only when a bucket is opened.

Read ``backend.py`` first: it implements ``Backend``, pack uploads and range reads included, with the requests of
``client.py``, the only module that imports obstore. ``errors.py`` says what a failed request means.

This file knows what a bucket address is, and loads none of them.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from ckstore.errors import UsageError

SCHEMES = ("s3", "gs", "az")


def is_bucket_address(text: str) -> bool:
    """Return True if a text is a bucket address and not a path."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def check_address(url: str) -> str:
    """Return the normalized address of a bucket and prefix.

    Raises:
        UsageError: It is not ``s3://bucket/prefix``. The message does not repeat credentials.
    """
    parts = urlsplit(url)
    if "@" in url or ":" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            "a bucket address must not contain a user, a password or a query",
            where=f"{parts.scheme}://...",
            todo="give bucket and prefix only; set credentials in the environment, a profile or a machine role",
        )
    folders = [folder for folder in parts.path.split("/") if folder]
    if parts.scheme not in SCHEMES or not parts.netloc or any(folder in (".", "..") for folder in folders):
        raise UsageError("not a bucket address: write s3://bucket/prefix", where=repr(url)[:200])
    return "/".join([f"{parts.scheme}://{parts.netloc}", *folders])
