"""Which checkpoints of a run are kept: rules, and the plan that follows from them. Nothing here reads or writes."""

from __future__ import annotations
