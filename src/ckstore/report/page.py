"""The page: one file that needs nothing else, no network and no other file, and runs no script but its own.

Invariants:
- Nothing that came from a store stands in the markup: it lies in a block of JSON, and the script sets it as text.
- The page's own policy lets nothing load, and only this very style and this very script be used, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def page_of(data: dict[str, Any]) -> str:
    """Return the page that shows this data."""
    style, script = _read("page.css"), _read("page.js")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _read("page.html")
    for mark, content in (
        ("%POLICY%", policy),
        ("%STYLE%", style),
        ("%SCRIPT%", script),
        ("%DATA%", embedded(data)),
    ):
        before, found, after = page.partition(mark)
        assert found, "the page has a place for everything"
        page = before + content + after
    return page


def embedded(data: dict[str, Any]) -> str:
    """Return JSON that no parser of HTML sees as anything else than text."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _source(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
