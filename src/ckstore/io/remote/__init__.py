"""The bucket backend (S3, GCS, Azure), loaded only when a bucket is opened.

Read ``backend.py`` first: it implements ``Backend`` with the requests of ``client.py``, the only module that imports
obstore, and the pack uploads and range reads of ``packs.py``. ``errors.py`` says what a failed request means.
"""

from __future__ import annotations
