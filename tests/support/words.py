"""Find words that the style guide bans: in documents, and in comments, strings and names of the code.

Run ``python tests/support/words.py [FOLDER-OR-FILE ...]`` to print every finding, and the count of each folder.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BANNED = {
    r"anew": "again",
    r"apart from that": "otherwise",
    r"aside": "say what happens: moved to quarantine, buffered, isolated",
    r"at once": "immediately, or: together",
    r"beside": "next to, with, during",
    r"(?:come|comes|came|coming) home": "say what happens",
    r"doomed": "pending deletion",
    r"fates?": "outcome",
    r"handed": "passed, given, submitted",
    r"in vain": "without success",
    r"(?<!there\s)(?-i:is none|are none)": "is not ...",
    r"(?:let|lets|letting) go": "release",
    r"(?:lie|lies|lay|lying) in": "is in, is stored in",
    r"(?:look|looks|looked|looking) at": "read, check, list",
    r"no more(?! than)": "no longer",
    r"(?:see|sees|saw|seen|seeing) off": "wait for",
    r"shelf": "say what it holds",
    r"(?<!\bas\s)soon": "say when",
    r"told": "reported, given",
    r"(?:tell|tells|telling) of": "report",
    r"what is told": "say what is reported",
    r"whoever": "name the process, function or user",
}
"""Pattern -> what to write. Whole words, in any case, across line ends."""

BANNED_NAMES = frozenset(
    {"anew", "aside", "doomed", "fate", "fates", "handed", "keeping", "shelf", "told", "untold", "whoever"}
)
"""Words that must not be a part of an identifier."""

STORED_NAMES = frozenset({"doomed", "lies in"})
"""Strings that cannot change: names in a store, and headings of tables that programs may read."""

TESTS = ("durability", "frameworks", "golden", "hostile", "integration", "perf", "project", "support", "unit")
FOLDERS = ("src/ckstore", "bench", "examples", *(f"tests/{name}" for name in TESTS))
"""Folders whose modules are checked."""

EXCEPTIONS = {
    "bench/cases_gc.py": "names in benchmark records",
    "bench/cases_training.py": "notes in benchmark records",
    "bench/table_cases.py": "names in benchmark records",
    "tests/project/test_words.py": "examples of banned words",
    "tests/support/words.py": "the banned words",
}
"""Modules that are not checked, and why."""

_PATTERN = re.compile("|".join(rf"\b{pattern}\b" for pattern in BANNED).replace(" ", r"\s+"), re.IGNORECASE)
_CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`", re.DOTALL)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

Finding = tuple[int, str]
"""Line and what was found there."""


def in_text(text: str, line: int = 1) -> Iterator[Finding]:
    """Yield the findings of a text that begins at ``line``; code between backticks does not count."""
    text = _CODE.sub(lambda code: "x" + "\n" * code[0].count("\n"), text)
    for match in _PATTERN.finditer(text):
        yield line + text.count("\n", 0, match.start()), " ".join(match[0].split()).lower()


def in_source(text: str) -> Iterator[Finding]:
    """Yield the findings of a module: in comments, in strings, and in identifiers."""
    for line, kind, words in _texts(text):
        if kind == "name":
            yield from ((line, f"name {words}") for part in _PART.findall(words) if part.lower() in BANNED_NAMES)
        else:
            yield from in_text(words, line)


def _texts(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and text of identifiers, comments and strings; successive comment lines are one text."""
    first, kind_before, parts = 0, "", [""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = _kind(token)
        if token.type == tokenize.NL and kind_before in ("comment", "string"):
            parts.append("\n")
        elif kind == kind_before and kind in ("comment", "string"):
            parts.append(_content(token, kind))
        else:
            if kind_before:
                yield first, kind_before, "".join(parts)
            first, kind_before, parts = token.start[0], kind, [_content(token, kind)]


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
        return "string" if _content(token, "string") not in STORED_NAMES else ""
    return {tokenize.COMMENT: "comment", tokenize.NAME: "name"}.get(token.type, "")


def _content(token: tokenize.TokenInfo, kind: str) -> str:
    if kind == "comment":
        return token.string.lstrip("#")
    if kind == "string":
        return re.sub(r"^[a-zA-Z]{0,2}(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", token.string)
    return token.string


def files() -> list[Path]:
    """Return the documents and modules that are checked."""
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    modules = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*documents, *(path for path in modules if path.relative_to(ROOT).as_posix() not in EXCEPTIONS)]


def findings(path: Path) -> list[Finding]:
    """Return what is banned in a file."""
    text = path.read_text()
    return list(in_source(text) if path.suffix == ".py" else in_text(text))


def main(chosen: list[str]) -> None:
    """Print every finding of the chosen places, and the count of each folder."""
    counts: Counter[str] = Counter()
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        found = findings(path)
        room = name if "/" not in name or name.startswith("docs/") else "/".join(name.split("/")[:3])
        counts[room] += len(found)
        if chosen and name.startswith(tuple(chosen)):
            for line, words in found:
                print(f"{name}:{line}: {words}")
    for room, count in sorted(counts.items()):
        if count:
            print(f"{count:5} {room}")
    print(f"{counts.total():5} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
