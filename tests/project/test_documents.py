"""Protects the documents: their links resolve, and they respect the length limits of the style guide."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES_MAX = {"README.md": 120, "docs/ARCHITECTURE.md": 350}
COLUMNS_MAX = {"docs/ARCHITECTURE.md": 200}


def documents():
    """Return README, the changelog and every page of docs/."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors_of(text):
    """Return the anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def broken_links(path, text):
    """Yield every relative link of a page that leads to no file, or to no heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: {link} does not exist"
        elif anchor and anchor not in anchors_of(target.read_text()):
            yield f"{path.relative_to(ROOT)}: {link} has no such heading"


def test_links_resolve():
    broken = [line for path in documents() for line in broken_links(path, path.read_text())]
    assert not broken, "\n" + "\n".join(broken)


def test_broken_link_is_found():
    readme = ROOT / "README.md"
    assert list(broken_links(readme, "[a](docs/nowhere.md)")) == ["README.md: docs/nowhere.md does not exist"]
    assert list(broken_links(readme, "[a](README.md#nowhere)")) == ["README.md: README.md#nowhere has no such heading"]
    assert not list(broken_links(readme, "[a](README.md#numbers) [b](https://example.org/x)"))


def test_architecture_names_modules_that_exist():
    named = set(re.findall(r"(?<![\w./])(?:\w+/)+\w+\.py", (ROOT / "docs" / "ARCHITECTURE.md").read_text()))
    assert len(named) > 40
    missing = [name for name in sorted(named) if not ((ROOT / "src/ckstore" / name).exists() or (ROOT / name).exists())]
    assert not missing, f"docs/ARCHITECTURE.md names modules that do not exist: {missing}"


def test_documents_are_short():
    for name, count in LINES_MAX.items():
        assert len((ROOT / name).read_text().splitlines()) <= count, f"{name} has more than {count} lines"
    for name, columns in COLUMNS_MAX.items():
        assert max(map(len, (ROOT / name).read_text().splitlines())) <= columns, f"{name} has longer lines"
