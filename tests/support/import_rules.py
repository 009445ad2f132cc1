"""Which room may import which, from bottom to top: the table that ``test_tidy`` holds the source against.

A row changes only in the commit that explains why.
"""

from __future__ import annotations

GROUND = {"errors", "clock", "display", "hashing", "config", "concurrency", "processes"}
FORMAT = GROUND | {"format", "results"}
STORE = FORMAT | {"state", "io", "codec", "store"}
CHECKPOINTS = STORE | {"delta", "restore", "commit"}

ALLOWED = {
    "errors": set(),
    "clock": set(),
    "display": {"errors"},
    "hashing": {"errors"},
    "config": {"errors", "display"},
    "concurrency": {"clock"},
    "processes": {"hashing"},
    "format": GROUND,
    "results": GROUND | {"format"},
    "state": FORMAT,
    "io": GROUND,
    "codec": FORMAT | {"state", "io"},
    "store": FORMAT | {"io"},
    "delta": STORE,
    "restore": STORE | {"delta"},
    "commit": STORE | {"delta"},
    "quant": CHECKPOINTS,
    "ops": CHECKPOINTS | {"quant"},
    "tiers": CHECKPOINTS | {"ops"},
    "ranks": CHECKPOINTS | {"quant", "ops"},
    "journal": CHECKPOINTS,
    "background": CHECKPOINTS | {"ops", "ranks", "journal"},
    "interval": FORMAT | {"background"},
    "preemption": FORMAT | {"background", "interval"},
    "api": CHECKPOINTS | {"quant", "ops", "tiers", "ranks", "journal", "background", "interval", "preemption"},
    "opening": STORE | {"ops", "ranks", "api"},
    "integrations": FORMAT | {"state", "background", "ops", "api", "opening"},
    "dcp": CHECKPOINTS | {"ranks", "background", "api"},
    "accelerate": {"integrations"},
    "lightning": {"integrations"},
    "transformers": {"integrations"},
    "run": {"integrations"},
    "cli": FORMAT | {"store", "ops", "tiers", "integrations", "api", "opening"},
    "_testing": CHECKPOINTS | {"background", "api"},
    "__init__": FORMAT | {"state", "ops", "ranks", "background", "interval", "journal", "api", "opening"},
    "__main__": {"cli"},
}
