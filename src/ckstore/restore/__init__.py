"""Restore: read the chunks of a checkpoint and put their bytes into the caller's state.

Order of a restore (``Store.restore`` in ``api``):

    restore_reference(ref, request)                # restore.py, which does:
        manifest = resolve(ref)                    #   store.refs, store.manifests: which checkpoint
        targets = prepare_restore(manifest, into)  #   state.placement: all checks, a destination for each storage
        restore(manifest, targets)                 #   restore.py:
            plan = plan_restore(manifest, targets) #     plan.py: frames, order, destinations; pure
            decode_all(plan)                       #     reader.py: open packs, fetch groups, decode on threads
            return targets.finish()                #     state.placement: build objects, call load_state_dict

Start with ``restore.restore_reference``, then ``plan.plan_restore``, then ``reader.decode_all``.

The way of one tensor, downwards only: api, store.refs, store.manifests, format.manifest, state.placement,
restore.restore, restore.plan, restore.reader, store.pack_reader, io.local_packs, codec.frame_decoder,
codec.chunk_codec, codec.byte_codecs, state.torch_adapter.

Not here: which checkpoint a reference means (``store``), how a chunk is decoded (``codec``, ``delta.chain_reader``)
and how objects are built or filled (``state``).
"""

from __future__ import annotations
