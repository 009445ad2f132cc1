"""Read-only views of a store and its checkpoints. Nothing here changes a store, except that doctor probes the disk.

Each module answers one question and returns plain data, which ``api.py`` returns and ``cli/`` prints:
- ``contents.py``: which tensors, groups and packs does a checkpoint consist of (``ckstore show``)?
- ``stats.py``: how is each tensor coded, and how far is that from its entropy (``ckstore show --codec``, ``stats``)?
- ``diff.py``: how do two checkpoints differ (``ckstore diff``)?
- ``doctor.py``: is this machine, and this store, set up well (``ckstore doctor``)?
- ``usage.py``: where are the bytes of the store (``ckstore du``)?
- ``report.py`` with ``page.html``, ``page.css``, ``page.js``: one HTML page about a store (``ckstore report``).

``contents.py``, ``usage.py`` and ``report.py`` read manifests only. ``stats.py`` and ``diff.py`` also decode
tensors, chunk by chunk.

Not here: finding damage (``ops/verify.py``), and changing anything.
"""

from __future__ import annotations
