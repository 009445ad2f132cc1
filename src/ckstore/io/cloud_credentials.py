"""The parts of the standard chain of credentials that obstore leaves out: profiles, endpoints without TLS, checks.

obstore itself takes keys from the environment, web identities, and the roles of containers and machines.

Invariants:
- Nothing read here is logged, shown, or kept in a place that is.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckstore.errors import UnreachableError, UsageError

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def allows_plain_http() -> bool:
    """Whether the environment names an endpoint without TLS: a server on this machine, or in a closed network."""
    return any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS)


def profile_credentials() -> dict[str, Any]:
    """Return the keys and the region of the profile in use, for obstore; nothing where something else gives keys.

    Raises:
        UnreachableError: ``AWS_PROFILE`` names a profile that is in no file.
    """
    wanted = os.environ.get("AWS_PROFILE", "")
    if not wanted and any(os.environ.get(name) for name in _OTHER_SOURCES):
        return {}
    profile = wanted or "default"
    keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    settings = _section("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}")
    if wanted and not keys and not settings:
        raise UnreachableError(
            f"there is no profile {wanted!r}", where="AWS_PROFILE", todo="check ~/.aws/credentials and ~/.aws/config"
        )
    merged = {**settings, **keys}
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
    }
    found = {ours: merged[theirs] for theirs, ours in names.items() if merged.get(theirs)}
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    return found


_ADDRESSES = {
    "s3": (
        *_ENDPOINTS,
        "AWS_ENDPOINT_URL_STS",
        "AWS_METADATA_ENDPOINT",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_MSI_ENDPOINT", "AZURE_STORAGE_AUTHORITY_HOST"),
}
_WORDS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"),
}
_WORD = re.compile(r"[!-~]*", re.ASCII)


def check_settings(scheme: str, profile: Mapping[str, str]) -> None:
    """Refuse settings in the environment, or a profile, that the client of buckets cannot use.

    Raises:
        UsageError: An endpoint is no ``http://`` or ``https://`` address, or a key or region is no single word; the
            message names the variable, and of a secret nothing else.
    """
    for name in _ADDRESSES[scheme]:
        value = os.environ.get(name, "")
        if value and not _is_endpoint(value):
            lacks_scheme = "//" not in value and _is_endpoint(f"http://{value}")
            raise UsageError(
                "the address of a server in the environment must be http://HOST or https://HOST, with :PORT if needed",
                where=f"{name}={'...' if '@' in value else value}"[:200],
                todo=f"put http:// or https:// before it: {name}=http://{value}" if lacks_scheme else "correct it",
            )
    words = {name: os.environ.get(name, "") for name in _WORDS.get(scheme, ())}
    words |= {f"{name} of the profile": value for name, value in profile.items()}
    for name, value in words.items():
        if not _WORD.fullmatch(value):
            raise UsageError(
                "a setting for the client of buckets holds a space, a line break or another letter that it cannot hold",
                where=name,
                todo="set it again, without what an editor or a copied line has added",
            )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        is_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and is_host and "@" not in parts.netloc and bool(_WORD.fullmatch(text))


def _section(variable: str, file: str, section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(Path(os.environ.get(variable) or Path.home() / ".aws" / file).read_text())
    except (OSError, UnicodeDecodeError, configparser.Error, RuntimeError):
        # Not there, or written for others: then it says nothing.
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}
