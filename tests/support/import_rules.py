"""Which module may import which: the table that ``test_tidy`` holds the source against.

A row in here changes only in the commit that explains why.
"""

from __future__ import annotations

GROUND = {"errors", "ids", "config", "clock", "tree", "values", "tensor", "leaves", "capture", "matching", "placement"}
GROUND |= {"metric_order"}  # Which value of a metric is the best, by its name and nothing else.
GROUND |= {"named_types", "standard_types", "packed"}  # Leaves that are neither tensors nor plain values.
GROUND |= {"latch"}  # What happens once, for whoever waits for it.
GROUND |= {"memory_spans"}  # What a capture finds, by address.
GROUND |= {"recapture", "workers"}  # A capture again, from what the last one has found; threads and nothing else.
GROUND |= {"pool"}  # Threads that ask many things at once; what they ask they do not know.
GROUND |= {"forks"}  # What a forked child lets go of; it knows nobody who has something.
GROUND |= {"logs"}  # How to log where nothing may be raised or waited for; it knows no logger.
GROUND |= {"children"}  # How child processes are started; it knows none of them.
"""``values leaves capture matching placement`` are ``tree`` and ``tensor`` cut to the limit of a file's length."""
CORE = {*GROUND, "format", "io", "kernels", "codec", "delta", "quant", "store", "plan", "pipeline", "forms"}
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "metric_order": set(),
    "ids": {"errors"},
    # What a policy may lose is told in the quantizers' own settings, which import errors only.
    "config": {"errors", "quant"},
    "policies": {"errors", "config", "quant"},
    "tree": {"errors"},
    "values": {"errors", "tree"},
    "tensor": {"errors", "tree", "values"},
    "named_types": {"tree"},
    "standard_types": {"errors", "tree", "named_types"},
    "packed": {"errors", "tree"},
    "leaves": {"errors", "tree", "values", "tensor"},
    "memory_spans": {"errors", "tree", "values", "tensor", "leaves"},
    # Long plain values are written as trees, as a manifest has them.
    "capture": GROUND | {"format"},
    "differences": {"tree"},
    # An object's part of a restore in place; a TrainState is one whose parts are.
    "loading": {"errors", "tree", "values", "tensor", "capture", "differences", "packed", "train_state"},
    "matching": GROUND | {"differences", "loading"},
    "recapture": GROUND,
    "placement": GROUND | {"format"},
    "kernels": GROUND,
    "format": GROUND,
    "io": GROUND,
    "codec": GROUND | {"kernels"},
    "delta": GROUND | {"kernels"},
    "quant": GROUND | {"kernels"},
    "store": GROUND | {"format", "io"},
    "plan": GROUND | {"format"},
    # How one chunk can be stored: the two places where codecs, deltas and quantizers meet.
    "forms": GROUND | {"codec", "delta", "kernels", "lossy_forms"},
    "lossy_directions": GROUND | {"codec", "quant", "kernels"},
    "lossy_payload": GROUND | {"codec", "quant", "kernels"},
    "lossy_grids": GROUND | {"codec", "quant", "kernels", "lossy_payload"},
    "lossy_forms": GROUND | {"lossy_directions", "lossy_grids", "lossy_payload", "codec", "quant", "kernels"},
    "pipeline": GROUND | {"format", "codec", "delta", "quant", "kernels", "plan", "forms", "choice"},
    # Parts of the two stories, in files of their own.
    "latch": {"clock"},
    "workers": {"latch"},
    "pool": {"latch", "workers"},
    "forks": set(),
    "logs": {"latch"},
    "children": set(),
    "receipt": GROUND | {"format"},
    "info": GROUND | {"format"},
    "arguments": GROUND | {"format"},
    "stale": GROUND | {"format"},
    "choice": GROUND,
    "bases": CORE | {"choice"},
    "masters": CORE,
    "pairing": {"errors", "tree", "values", "tensor", "packed"},
    "train_state": {"errors", "capture"},
    "distance": GROUND,
    "lossy": CORE | {"pairing"},
    "lossy_plan": CORE | {"bases", "lossy"},
    "lossy_methods": CORE | {"lossy", "lossy_directions", "lossy_forms"},
    "diverged": CORE | {"capture", "distance", "lossy"},
    "lossy_warnings": CORE | {"capture", "diverged", "lossy"},
    "fates": CORE | {"distance", "lossy", "lossy_methods", "pairing"},
    "survey": CORE | {"choice", "bases"},
    "basing": CORE | {"capture", "choice", "bases", "masters", "survey", "lossy", "lossy_plan"},
    "decoder": CORE,
    "chain_reader": CORE | {"decoder"},
    "restore_plan": CORE,
    "narrowing": CORE,
    "coding_thread": CORE | {"chain_reader", "decoder"},
    "write_blocks": CORE | {"coding_thread"},
    "written": CORE,
    "chunks": CORE | {"workers", "bases", "basing", "coding_thread", "write_blocks", "written"},
    "tiny_moments": set(),
    "lossy_task": CORE
    | {"written", "coding_thread", "lossy", "lossy_forms", "lossy_methods", "distance", "fates", "tiny_moments"},
    "lossy_target": CORE | {"coding_thread", "distance", "lossy", "lossy_forms", "lossy_task"},
    "lossy_chunks": CORE
    | {
        "lossy_target",
        "chunks",
        "coding_thread",
        "bases",
        "basing",
        "lossy",
        "lossy_forms",
        "lossy_task",
        "distance",
        "fates",
        "written",
    },
    "fetch": CORE | {"chain_reader", "decoder", "restore_plan"},
    "commit": CORE
    | {"chunks", "lossy_chunks", "lossy", "lossy_warnings", "fates", "receipt", "stale", "bases", "basing", "written"}
    | {"write_blocks", "room"},
    # Where a disk is full, a commit collects.
    "room": CORE | {"collection", "retention"},
    # After damage: what else can be read.
    "fallback": CORE | {"decoder"},
    "restore": CORE | {"fetch", "chain_reader", "decoder", "restore_plan"},
    "history": CORE,
    # Rules and plans know no files; the collector knows no rules; they meet in ``collection``.
    "retention": GROUND,
    # Other tiers: buckets, other folders.
    "push": CORE,
    "pull": CORE,
    "mirror": CORE,
    "tiering": CORE | {"handle", "retention", "push", "pull", "mirror"},
    "collection": CORE | {"retention"},
    "keeping": CORE | {"retention", "collection", "automatic_gc", "handle", "info"},
    "after_commits": CORE,
    "automatic_gc": CORE | {"after_commits", "retention", "collection"},
    # What is stored, seen as a state; and what is told of it, or made of it anew.
    "stored_state": CORE | {"chain_reader", "decoder"},
    "coding": CORE | {"info", "lossy_forms"},
    "stats": CORE | {"coding", "info", "stored_state"},
    "repack_ledger": CORE,
    "repack_sketch": CORE | {"bases", "basing", "choice", "repack_ledger", "stored_state"},
    "repack_plan": CORE | {"bases", "basing", "repack_ledger", "repack_sketch"},
    "repack": CORE
    | {"bases", "basing", "chunks", "coding_thread", "repack_plan", "repack_sketch", "stored_state", "written"},
    "diff": CORE | {"info", "stored_state", "distance"},
    "demote_plan": CORE | {"lossy_warnings"},
    "demote": CORE
    | {"demote_plan", "bases", "basing", "written", "fates", "lossy", "lossy_chunks", "repack", "stored_state"}
    | {"capture", "lossy_warnings"},
    "demote_policy": CORE | {"policies"},
    "automatic_demotion": CORE | {"after_commits", "demote", "demote_policy", "policies"},
    "demoting": CORE | {"automatic_demotion", "background", "demote", "demote_plan", "demote_policy", "diff"},
    # What other tools have saved, and what is left of what was damaged.
    "importing": CORE | {"adapters", "capture", "info", "receipt"},
    "importer": CORE | {"arguments", "background", "commit", "importing", "info", "receipt"},
    "repair_search": CORE,
    "repair_plan": CORE | {"repair_search"},
    "repair_copies": CORE | {"repair_plan", "repair_search"},
    "repair": CORE | {"repair_copies", "repair_plan", "repair_search"},
    "repairing": CORE | {"background", "decoder", "repair"},
    # A page of what manifests say.
    "report": CORE | {"collection", "info", "listing", "stats"},
    "reporting": CORE | {"collection", "handle", "report"},
    # It tells the story of a commit in another process, with what a handle remembers in this one.
    "saver": GROUND
    | {"format", "io", "store", "plan", "survey", "bases", "stale", "receipt", "commit", "history", "policies"}
    | {"write_blocks", "room"},
    # The trainer's end of a background commit: from captured tensors to a slot that the saver was told of.
    "staging": CORE | {"saver", "adapters"},
    "pending": {"clock", "errors", "latch", "logs", "receipt"},
    # A receipt is what the saver calls back with.
    "handed": CORE | {"pending", "receipt", "saver", "staging"},
    "outstanding": {"config", "errors", "handed", "saver", "staging"},
    "handover": CORE | {"handed", "outstanding", "pending", "receipt", "saver", "staging", "write_blocks"},
    # When to commit: arithmetic, what it is fed with, and signals.
    "advice": {"errors"},
    "interval": {"advice", "arguments", "clock", "errors"},
    "signals": {"advice", "arguments", "clock", "errors", "forks"},
    "advising": {"advice", "arguments", "errors", "handle", "interval", "signals", "store"},
    "background": CORE
    | {"adapters", "advising", "arguments", "bases", "handed", "handle", "handover", "pending", "saver", "stale"},
    "handle": CORE | {"contents", "coding", "stats", "info", "decoder", "chain_reader"},
    "api": CORE
    | {
        "arguments",
        "demoting",
        "importer",
        "keeping",
        "repairing",
        "reporting",
        "tiering",
        "background",
        "bases",
        "handle",
        "contents",
        "commit",
        "fallback",
        "restore",
        "narrowing",
        "history",
        "receipt",
        "repack",
        "info",
        "stale",
        "saver",
        "fetch",
        "adapters",
    },
    "adapters": GROUND | {"api", "kernels", "outfile"},
    # What the command line shows; functions of the library like the others.
    "listing": CORE | {"info"},
    "contents": GROUND | {"format", "info"},
    "diagnosis": CORE,
    "outfile": GROUND | {"io"},
    "cli": GROUND
    | {"adapters", "diagnosis", "importer", "info", "keeping", "listing", "outfile", "retention", "store"},
    # What tests see of an open store; it imports for types only.
    "_testing": set(),
    "__main__": {"cli"},
    "__init__": {"retention"}
    | {"advice", "interval"}
    | {"quant", "train_state", "api", "config", "errors", "info", "receipt", "retention", "values"},
}
"""Part to parts it may import, from the table of STYLE.md; a part is the first name below ``ckstore``."""
