"""How a bucket is addressed, how patient its client is, and what is known of an object; nothing here talks to one.

Invariants:
- An address holds scheme, bucket and prefix. One with a user, a password or a query is refused, and not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ckstore.errors import UsageError

SCHEMES = ("s3", "gs", "az")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How patient a bucket's client is, and how much it does at once.

    Args:
        try_count: How often a request is made before it has failed.
        pause_seconds: How long to wait before the second time; twice as long before each further one.
        pause_seconds_max: And never longer.
        read_timeout_seconds: How long a connection may be silent.
        request_timeout_seconds: How long one request may take, its body included.
        connect_timeout_seconds: How long a connection may take to be made.
        parts_at_once: Parts of one pack that are being written at once.
        reads_at_once: Ranges that are being read at once.
    """

    try_count: int = 6
    pause_seconds: float = 0.2
    pause_seconds_max: float = 10.0
    read_timeout_seconds: float = 30.0
    request_timeout_seconds: float = 600.0
    connect_timeout_seconds: float = 10.0
    parts_at_once: int = 4
    reads_at_once: int = 16


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object without reading it.

    Attributes:
        nbytes: Its size.
        modified_ns: When it was made.
        etag: The server's name for this version; not always a digest.
        attempt: The token of the try that made it; empty where it carries none.
    """

    nbytes: int
    modified_ns: int
    etag: str
    attempt: str


def is_bucket_address(text: str) -> bool:
    """Whether a text is the address of a bucket rather than a path."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def check_address(url: str) -> str:
    """Return the address of a bucket and prefix in its one spelling.

    Raises:
        UsageError: It holds more than that, credentials perhaps; they are not repeated.
    """
    repository = urlsplit(url)
    if "@" in url or ":" in repository.netloc or repository.query or repository.fragment:
        raise UsageError(
            "the address of a bucket holds a user, a password or a query",
            where=f"{repository.scheme}://...",
            todo="name bucket and prefix only; credentials come from the environment, a profile or the machine's role",
        )
    folders = [part for part in repository.path.split("/") if part]
    if repository.scheme not in SCHEMES or not repository.netloc or any(part in (".", "..") for part in folders):
        raise UsageError("an address of a bucket is written s3://bucket/prefix", where=repr(url)[:200])
    return "/".join([f"{repository.scheme}://{repository.netloc}", *folders])
