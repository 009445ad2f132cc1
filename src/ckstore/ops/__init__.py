"""Operations on existing stores. Each is a function that takes a ``Repository`` and returns a report as plain data.

Most have two parts: ``plan_…`` decides and changes nothing, then the operation carries the plan out. A dry run stops
after the plan.

- gc (``gc/__init__.py`` has the walk): delete checkpoints by retention rules, and free packs. ``scheduled.py`` runs it
  after every N commits.
- commit (``commit.py``): free space and commit again when the disk is full; load quantization only if it is wanted.
- demote (``demote.py``): store old checkpoints with a bounded loss.
- ``replay_form.py``: checkpoints without bytes of tensors, which the user's training code makes again.
- repack (``repack.py``, ``repack_plan.py``): code a run again, so that the newest checkpoints are restored fastest.
- verify (``verify.py``, ``verify_packs.py``): read everything, and report damage. ``fallback.py``: after a restore met
  damage, find an older checkpoint that is readable.
- repair (``repair.py``, ``repair_plan.py``, ``pack_copies.py``): make checkpoints complete from every copy of a frame.
  ``repair_segments.py``: journals, from their copies. ``store_identity.py``: a missing ``store.json``.
- trash (``trash.py``): list it, restore from it, and empty it.
- ``stored_checkpoint.py``: read a checkpoint as a state, for demote, repack, ``inspect/diff.py`` and ``stats.py``.
- ``stored_policies.py``: the policies in ``config.json``.
- ``inspect/``: read-only views. ``interop/``: import and export of other formats.

Manifests are changed in one way only: publish the next generation, then move the lower one to the trash
(``finish_replacement`` in ``store/repository.py``; docs/FORMAT.md section 10, Replace). So an operation that crashes
leaves every checkpoint in its old or its new form, and can be run again.

Not here: committing and restoring (``commit/``, ``restore/``), other storage locations (``tiers/``), and arguments and
defaults of the public methods (``api.py``).
"""
