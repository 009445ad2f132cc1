"""Copies of a store in other places: tiers, to which checkpoints are moved, and mirrors, which copy a whole store.

A *tier* is a second storage location of one store: a folder or a bucket with a name in ``config.json``. The copy there
is a store of its own with the same identity and the same pack and manifest names. In this package *here* means the
store that a verb runs on, and *there* means the other place.

Start reading with one verb, then with the copying they share:

- ``push.push`` moves old checkpoints of a run to a tier; ``pull.pull`` brings them back. For each checkpoint::

      claim its seq there              # nobody else can use the number
      copy its packs and check them    # copy.PackCopy, verify_copy.IncomingPackCheck
      put its manifest there           # copy.StoreCopy: the checkpoint now exists there
      publish its next generation here # which names the tier; gc then frees the local packs

- ``segments.SegmentCopy`` copies the points of journals, after the checkpoints from which they are restored.
- ``mirror.mirror`` copies all runs to another place and changes nothing here.
- ``gc.collect_tier`` deletes dropped checkpoints and unreferenced packs in a tier.

The rule behind all of them: a manifest is published only after every pack that it names was checked in its place. A
crash between two steps leaves every checkpoint restorable, and running the verb again completes it.

Names of tiers, and the check that a tier has not lost packs, are in ``store/tiers.py`` and ``store/tier_checks.py``.
Requests to a bucket belong to ``io/remote``.
"""

from __future__ import annotations
