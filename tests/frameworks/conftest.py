"""Frameworks for the tests here, offline and quiet. Where one is not installed, its tests are skipped with the reason.

``pip install -e '.[frameworks]'`` installs them. Their own warnings are not ours to fix, so they are ignored.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def import_or_skip(name):
    """Return a framework; skip the test if it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture(scope="session")
def transformers():
    found = import_or_skip("transformers")
    found.utils.logging.disable_progress_bar()
    found.utils.logging.set_verbosity_error()
    return found


@pytest.fixture(scope="session")
def peft(transformers):
    return import_or_skip("peft")


@pytest.fixture(scope="session")
def huggingface_hub():
    return import_or_skip("huggingface_hub")
