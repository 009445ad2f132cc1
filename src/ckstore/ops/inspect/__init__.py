"""One page that shows a store: data gathered from manifests, and the page that draws it."""

from __future__ import annotations
