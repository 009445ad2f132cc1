"""Let every Accelerator of accelerate's own tests save into a store."""

from __future__ import annotations

import tempfile

import pytest

from ckstore.integrations import launch, pointer_store

saves: list[int] = []


def pytest_configure() -> None:
    # In the foreground, so that older folders are deleted before a save returns, as the tests expect.
    at = pointer_store.PointerStore.at
    pointer_store.PointerStore.at = lambda *args, **how: at(*args, **{**how, "background": False})
    launch.open_doors(tempfile.mkdtemp(prefix="ckstore-judge-"))
    save = pointer_store.PointerStore.save

    def counted(self, *args, **options):
        saves.append(1)
        return save(self, *args, **options)

    pointer_store.PointerStore.save = counted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{len(saves)} saves went into a store")
