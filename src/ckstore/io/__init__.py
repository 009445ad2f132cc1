"""Backends: where the named files of a store are, and how their bytes are read and written durably.

Start reading here:

1. ``url.backend_for(address)`` returns a backend: ``LocalBackend`` for a folder, ``RemoteBackend`` for a bucket.
2. ``backend.Backend`` is the protocol they implement, with the promises that a commit relies on.
3. A pack is written in large aligned blocks and read by ranges::

       writer = BlockWriter(backend.create_pack(name, nbytes_expected=n), pool)
       reservation = writer.reserve(nbytes)          # in file order
       writer.fill(reservation, parts)               # on any thread
       writer.done(reservation)
       writer.finish()                               # all bytes are durable
       backend.read_ranges(requests, pool)           # yields results in any order

A new backend must keep the promises in ``backend.py``: ``create``, ``link``, ``rename_new`` and ``create_pack`` replace
nothing; ``link`` and ``rename_new`` publish a complete file in one step; synced bytes and names survive a power cut. It
proves the first two by passing ``BackendSuite`` in ``tests/support/suites.py``, as in
``tests/unit/io/test_backends.py``. ``tests/durability`` kills processes and cuts the power of a disk to test the third.

This package knows names and bytes. Chunks, manifests and the layout of a store do not belong here.
"""

from __future__ import annotations
