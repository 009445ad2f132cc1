"""A user's state: capture it for a commit, and build or fill it in a restore.

Start reading here, in calling order:

    captured = capture(state, adapters)            # capture.py: tree + tensors + storages, no bytes copied
    ... commit stores captured.storages and captured.tree ...

    targets = prepare_restore(tree, tensors, storages, into=state)      # placement.py: check, match, choose memory
    for storage in targets.storages:
        read(storage, targets.destination(storage))                     # done by the restore room
        targets.complete(storage)
    state = targets.finish()                                            # build objects, call load_state_dict

- Interfaces: ``tensors`` (LeafAdapter, TensorLeaf), ``memory``. Adapters: ``numpy_adapter``, ``torch_adapter``.
- Leaves: ``values`` (plain values, converters), ``standard_types``, ``named_types``, ``train_state``.
- Capture: ``capture``, and ``capture_cache`` for repeated captures of one structure.
- Restore: ``placement``; ``loading`` and ``matching`` (live state); ``torch_objects`` (objects with load_state_dict).

Not here: bytes of trees and manifests (``format``), files, chunks and codecs. Only ``torch_adapter`` and
``torch_objects`` import torch, and nothing else in the room imports them.
"""

from __future__ import annotations
