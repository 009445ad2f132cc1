"""Tests with training frameworks. They are skipped where the framework is not installed."""

from __future__ import annotations

import os

# Models are made from configs. Nothing is asked of the network.
os.environ["HF_HUB_OFFLINE"] = "1"
