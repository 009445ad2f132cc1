"""Differences between checkpoints: which bases a commit may use, what they cost, and how a chain is read back.

- ``base_cache.BaseCache`` keeps the possible bases of the next commit, with their samples and perhaps their bytes. The
  chunks of the last checkpoint are the *previous* bases; the roots of their delta chains are the *keyframe* bases:

      bases.begin(nbytes_max)          # a commit starts
      bases.previous_at(position, ...) # its possible bases
      bases.hold(chunk_id, plain)      # bytes that the next commit will need
      bases.follow(manifest)           # the commit was published: its chunks are the bases from now on

- ``cost_model.decide`` chooses the kind of base for each part of a state from estimated costs. It reads no bytes.
- ``chain_reader.ChainReader.read`` decodes a chunk through all its bases. Restores and commits use it.

Not here: sampling a state and planning its chunks (``commit``), and the arithmetic of one difference
(``codec.chunk_codec``).
"""

from __future__ import annotations
