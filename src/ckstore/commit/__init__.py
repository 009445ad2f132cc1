"""Write one checkpoint: cut the state into chunks, choose a base for each, code, write packs, publish a manifest.

Start at ``commit.commit``. It calls, in this order:

    chunking.plan_commit             cut storages into chunks                    (pure)
    base_selection.select_bases      choose how each chunk is stored             (reads samples of the state)
    chunk_writer.ChunkWriter.write   hash, encode, check and write each chunk    (on several threads)
                                     make the packs durable; after an error, remove them
    commit._publish                  link the manifest: from here on the checkpoint exists

``ops/repack.py`` and ``ops/demote.py`` write stored checkpoints again with the same ``ChunkWriter.write``. All three
share ``unpublished``: the state between durable packs and a published manifest.
``pipeline`` holds the memory of one thread and what it does with one chunk.

Callers use ``ckstore.ops.commit.commit_checkpoint``. It adds quantization for a policy with a residual, and one more
try after freeing space on a full disk. This package imports neither: it sees quantization through the protocols
``LossyCommit``, ``LossyCandidates`` and ``LossyChunks``, which ``quant`` implements.

Not here: estimates and bases of past commits (``delta``), coding of bytes (``codec``), pack files (``store``).
"""

from __future__ import annotations
