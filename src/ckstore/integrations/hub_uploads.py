"""Uploads of a trainer to the hub, without the store and its files in the uploaded folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ckstore.integrations.checkpoint_folders import OUTPUT_FILE


@contextlib.contextmanager
def uploads_without(store: str, folder: str, module: ModuleType) -> Iterator[None]:
    """Let uploads leave out a store in the folder, and what the store keeps outside of it, inside this context.

    Args:
        store: Path or URL of the store.
        folder: What is uploaded.
        module: The module that uploads, with a function ``hf_api``.
    """
    place, parent = Path(store).resolve(), Path(folder).resolve()
    left_out = [f"{OUTPUT_FILE}*", ".checkpoint-*"]
    if "://" not in store and place.is_relative_to(parent):
        inner = place.relative_to(parent).as_posix()
        left_out += [inner, f"{inner}/*"]
    original: Callable[[], Any] = module.hf_api
    replaced: Any = module
    replaced.hf_api = lambda: _Uploads(original(), left_out)
    try:
        yield
    finally:
        replaced.hf_api = original


class _Uploads:
    """An API of the hub that leaves out paths when it uploads a folder."""

    def __init__(self, api: Any, left_out: Sequence[str]) -> None:
        self._api = api
        self._left_out = left_out

    def upload_folder(self, *, ignore_patterns: Sequence[str] = (), **how: Any) -> Any:
        return self._api.upload_folder(ignore_patterns=[*ignore_patterns, *self._left_out], **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)
