"""The parts of the standard chain of credentials that obstore leaves out: profiles, and endpoints without TLS.

obstore itself takes keys from the environment, web identities, and the roles of containers and machines.

Invariants:
- Nothing read here is logged, shown, or kept in a place that is.
"""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import Any

from ckstore.errors import NotFoundError

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
        NotFoundError: ``AWS_PROFILE`` names a profile that is in no file.
    """
    wanted = os.environ.get("AWS_PROFILE", "")
    if not wanted and any(os.environ.get(name) for name in _OTHER_SOURCES):
        return {}
    profile = wanted or "default"
    keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
    settings = _section("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}")
    if wanted and not keys and not settings:
        raise NotFoundError(
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


def _section(variable: str, file: str, section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(Path(os.environ.get(variable) or Path.home() / ".aws" / file).read_text())
    except (OSError, UnicodeDecodeError, configparser.Error, RuntimeError):
        # Not there, or written for others: then it says nothing.
        return {}
    return dict(parser[section]) if parser.has_section(section) else {}
