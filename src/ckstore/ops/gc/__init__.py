"""Garbage collection: delete checkpoints that no retention rule keeps, and free packs that no manifest names.

From ``Store.gc`` to a freed pack, read downwards:

1. ``api.py``: ``Store.gc`` turns arguments into ``GcLimits`` and a ``Retention`` (``policy.py``).
2. ``run.py``: ``collect_store`` takes the lock and calls the next four in order.
3. ``survey.py``: ``survey`` reads the whole store; ``store/reachability.py`` finds the packs that manifests name.
4. ``rules.py``: ``plan_run`` applies the rules to each run. Pure.
5. ``plan.py``: ``make_plan`` turns survey and verdicts into a ``GcPlan``. Pure.
6. ``collect.py``: ``collect`` carries the plan out, and ``rewrite_packs.py`` rewrites packs with much waste.
7. ``store/trash.py``: moves packs to the trash, and unlinks them after ``trash_for``.

Mark and sweep, while writers commit (docs/FORMAT.md section 10, Collect)::

    trash = list(trash); marks = packs named by manifests              # survey
    put back what is in both; delete checkpoints by rules
    garbage = packs in place - marks of the manifests that stay        # plan
    marks = read manifests again; garbage -= marks                     # collect; writers may have reused packs
    move garbage to the trash                                          # a writer that misses a pack puts it back
    for each trash folder older than trash_for:
        marks = read manifests again; put back trash & marks; unlink the rest

Not here: gc of a tier (``tiers/gc.py``), and gc when the disk is full or on a schedule (``ops/``).
"""
