"""A store on disk: packs, manifests, tags, the writer lease, the trash, and who may change them.

What lies on disk (docs/FORMAT.md section 2 is complete and normative)::

    store.json, config.json       the store's id and limits; what a person may change
    packs/<xx>/<pack id>.pack     frames: encoded chunks. A pack is written once.
    manifests/<run>/              one file per checkpoint and generation. Publishing it creates the checkpoint.
    claims/<run>/                 taken seqs, and marks on them: dropped, published, intent
    tags/<run>/, leases/<run>     names given by people; who may write the run
    trash/, quarantine/           removed files that can still be brought back; damaged files
    tmp/, cache/, reserve/        drafts, ranges read from tiers, space for deleting on a full disk

Start with ``Repository`` (``repository.py``). A commit calls, in this order::

    repository.prepare_run()        # folders; index the chunks that can be reused
    repository.lease.take()
    seq = manifests.claim(...)      # packs are durable by now (pack_writer.py)
    manifests.publish(manifest)     # draft, sync, link, sync the folder: the commit point
    repository.rescue_packs(...)    # a pack has vanished: withdraw, and commit again

Only ``ops/gc`` and ``tiers/gc`` delete packs. They follow ``reachability.py``, ``trash.py`` and ``pending_deletes.py``.
A checkpoint is dropped by ``history.py`` only: intent, tags read again, drop mark, trash.

How much memory the threads of an operation may use is in ``memory_budget.py``.

Encoding, choosing bases, and the verbs of the command line do not belong here.
"""

from __future__ import annotations
