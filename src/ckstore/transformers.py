"""The door into the Trainer of transformers: ``ckstore.transformers.attach(trainer)``."""

from __future__ import annotations

from ckstore.integrations.transformers import attach as attach

__all__ = ["attach"]
