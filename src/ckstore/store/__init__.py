"""Content-addressed chunks, manifests, leases, tags: all that keeps checkpoints, moving frames it cannot read."""

from __future__ import annotations
