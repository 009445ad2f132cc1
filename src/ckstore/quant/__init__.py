"""Lossy storage of weights and Adam moments: quantized differences (residuals), within the bounds of the policy.

Quantization plugs into a commit. ``writer.ResidualCommit`` is the object that ``commit`` receives, and
``chunk_codec.decode`` is what ``codec`` loads to decode a quantized chunk. A commit runs in this order:

    roles.pair                 which tensors are weights and moments, and which belong together
    planning.Candidates        which of them may be quantized under the policy's rules
    planning.plan_lossy        which are quantized in this commit, against which base; tasks of aligned chunks
    quantize_task.TaskCoder    quantize and code the chunks of one task
    bounds.apply_bounds        tensors that exceed a bound are stored exactly after all
    writer.LossyChunkWriter    searches the steps for a wanted size, runs the tasks and writes the frames

``chunk_codec`` quantizes and decodes one chunk; ``grid``, ``lowrank`` and ``geometry`` do the arithmetic, ``payload``
and ``lowrank_payload`` the bytes; ``error_stats`` measures errors, ``warnings`` checks for NaN and unused rules.

What is hashed and committed is the reconstruction, so restoring a quantized chunk is exact. Exact commits import
nothing from here. Not here: exact differences (``codec.chunk_codec``) and policies (``config``).
"""

from __future__ import annotations
