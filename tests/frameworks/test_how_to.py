"""Every code block of the how-to pages runs, in the order of its page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("*.md"))
NEEDS = {
    "transformers.md": "transformers",
    "lightning.md": "lightning",
    "accelerate.md": "accelerate",
    "weights.md": "transformers",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks_of(page):
    """Return the language and the text of each block. Blocks without a language are not run."""
    return [(language, text) for language, text in BLOCK.findall(page.read_text()) if language]


def test_blocks_have_a_known_language():
    assert {language for page in PAGES for language, _ in blocks_of(page)} == {"python", "sh"}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.stem)
def test_page_runs(page, tmp_path):
    if page.name in NEEDS and importlib.util.find_spec(NEEDS[page.name]) is None:
        pytest.skip(f"{NEEDS[page.name]} is not installed")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    # One interpreter for neighbouring Python blocks: later ones use the names of earlier ones.
    script, number = "", 0
    for language, text in [*blocks_of(page), ("end", "")]:
        if language == "python":
            script += text
            continue
        if script:
            number += 1
            (tmp_path / f"block_{number}.py").write_text(script)
            run([sys.executable, f"block_{number}.py"], tmp_path, environment)
            script = ""
        if language == "sh":
            run(["bash", "-euo", "pipefail", "-c", text], tmp_path, environment)


def run(command, folder, environment):
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
