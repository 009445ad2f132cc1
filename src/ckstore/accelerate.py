"""The door into accelerate: ``ckstore.accelerate.attach(accelerator)``."""

from __future__ import annotations

from ckstore.integrations.accelerate import attach as attach

__all__ = ["attach"]
