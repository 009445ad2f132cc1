"""Lightning and Fabric save into a store: ``CheckpointIO``, ``ExactResume``, ``load``, ``install_loader``."""

from __future__ import annotations

from ckstore.integrations.exact_resume import ExactResume as ExactResume
from ckstore.integrations.lightning import CheckpointIO as CheckpointIO
from ckstore.integrations.lightning import install_loader as install_loader
from ckstore.integrations.lightning import load as load

__all__ = ["CheckpointIO", "ExactResume", "install_loader", "load"]
