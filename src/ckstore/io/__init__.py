"""Names and bytes: backends, aligned buffers, the aggregated writer, engines. Knows nothing of chunks."""

from __future__ import annotations
