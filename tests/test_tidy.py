"""The laws of style, as a test: who imports whom, one door a library, limits, a charter in every module.

A number in here changes only in the commit that explains why.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "ckstore"
FUNCTION_LINES_MAX, FILE_LINES_MAX, COLUMNS_MAX = 60, 400, 120

GROUND = {"errors", "ids", "config", "clock", "tree", "values", "tensor", "leaves", "capture", "matching", "placement"}
GROUND |= {"recapture", "workers"}  # A capture again, from what the last one has found; threads and nothing else.
"""``values leaves capture matching placement`` are ``tree`` and ``tensor`` cut to the limit of a file's length."""
CORE = {*GROUND, "format", "io", "kernels", "codec", "delta", "quant", "store", "plan", "pipeline", "forms"}
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "ids": {"errors"},
    # What a policy may lose is told in the quantizers' own settings, which import errors only.
    "config": {"errors", "quant"},
    "policies": {"errors", "config", "quant"},
    "tree": {"errors"},
    "values": {"errors", "tree"},
    "tensor": {"errors", "tree", "values"},
    "leaves": {"errors", "tree", "values", "tensor"},
    "capture": {"errors", "tree", "values", "tensor", "leaves"},
    "matching": {"errors", "tree", "values", "tensor", "leaves", "capture"},
    "recapture": {"errors", "tree", "values", "tensor", "leaves", "capture"},
    "placement": GROUND,
    "kernels": GROUND,
    "format": GROUND,
    "io": GROUND,
    "codec": GROUND | {"kernels"},
    "delta": GROUND | {"kernels"},
    "quant": GROUND | {"kernels"},
    "store": GROUND | {"format", "io"},
    "plan": GROUND | {"format"},
    # How one chunk can be stored: the two places where codecs, deltas and quantizers meet.
    "forms": GROUND | {"codec", "delta", "kernels", "lossy_forms"},
    "lossy_directions": GROUND | {"codec", "quant", "kernels"},
    "lossy_payload": GROUND | {"codec", "quant", "kernels"},
    "lossy_grids": GROUND | {"codec", "quant", "kernels", "lossy_payload"},
    "lossy_forms": GROUND | {"lossy_directions", "lossy_grids", "lossy_payload", "codec", "quant", "kernels"},
    "pipeline": GROUND | {"format", "codec", "delta", "quant", "kernels", "plan", "forms", "choice"},
    # Parts of the two stories, in files of their own.
    "workers": set(),
    "receipt": GROUND | {"format"},
    "info": GROUND | {"format"},
    "arguments": GROUND | {"format"},
    "stale": GROUND | {"format"},
    "choice": GROUND,
    "device_bases": {"ids"},
    "bases": CORE | {"choice", "device_bases"},
    "masters": CORE,
    "pairing": {"errors", "tree", "values", "tensor"},
    "train_state": {"errors", "capture"},
    "distance": GROUND,
    "lossy": CORE | {"pairing"},
    "lossy_plan": CORE | {"bases", "lossy"},
    "lossy_methods": CORE | {"lossy", "lossy_directions", "lossy_forms"},
    "diverged": CORE | {"capture", "distance", "lossy"},
    "lossy_warnings": CORE | {"capture", "diverged", "lossy"},
    "fates": CORE | {"lossy", "lossy_methods", "pairing"},
    "survey": CORE | {"choice", "bases"},
    "basing": CORE | {"capture", "choice", "bases", "masters", "survey", "lossy", "lossy_plan"},
    "decoder": CORE,
    "chain_reader": CORE | {"decoder"},
    "restore_plan": CORE,
    "chunks": CORE | {"workers", "bases", "basing", "chain_reader", "decoder"},
    "tiny_moments": set(),
    "lossy_task": CORE | {"chunks", "lossy", "lossy_forms", "lossy_methods", "distance", "fates", "tiny_moments"},
    "lossy_on_device": CORE | {"lossy_directions", "lossy_forms", "lossy_grids"},
    "lossy_device_task": CORE
    | {"chunks", "device_bases", "distance", "lossy", "lossy_methods", "lossy_on_device", "lossy_task", "tiny_moments"},
    "lossy_target": CORE | {"chunks", "distance", "lossy", "lossy_forms", "lossy_task"},
    "lossy_chunks": CORE
    | {"lossy_target", "chunks", "bases", "basing", "lossy", "lossy_forms", "lossy_task", "distance", "fates"}
    | {"lossy_device_task"},
    "fetch": CORE | {"chain_reader", "decoder", "restore_plan"},
    "commit": CORE
    | {"chunks", "lossy_chunks", "lossy", "lossy_warnings", "fates", "receipt", "stale", "bases", "basing"},
    "restore": CORE | {"fetch", "chain_reader", "decoder", "restore_plan"},
    "history": CORE,
    # Rules and plans know no files; the collector knows no rules; they meet in ``collection``.
    "retention": GROUND,
    # Other tiers: buckets, other folders.
    "push": CORE,
    "pull": CORE,
    "mirror": CORE,
    "tiering": CORE | {"handle", "retention", "push", "pull", "mirror"},
    "collection": CORE | {"retention"},
    "keeping": CORE | {"retention", "collection", "automatic_gc", "handle", "info"},
    "after_commits": CORE,
    "automatic_gc": CORE | {"after_commits", "retention", "collection"},
    # What is stored, seen as a state; and what is told of it, or made of it anew.
    "stored_state": CORE | {"chain_reader", "decoder"},
    "coding": CORE | {"info", "lossy_forms"},
    "stats": CORE | {"coding", "info", "stored_state"},
    "repack_ledger": CORE,
    "repack_sketch": CORE | {"bases", "basing", "choice", "repack_ledger", "stored_state"},
    "repack_plan": CORE | {"bases", "basing", "repack_ledger", "repack_sketch"},
    "repack": CORE | {"bases", "basing", "chunks", "repack_plan", "repack_sketch", "stored_state"},
    "diff": CORE | {"info", "stored_state", "distance"},
    "demote_plan": CORE | {"lossy_warnings"},
    "demote": CORE
    | {"demote_plan", "bases", "basing", "chunks", "fates", "lossy", "lossy_chunks", "repack", "stored_state"}
    | {"capture", "lossy_warnings"},
    "demote_policy": CORE | {"policies"},
    "automatic_demotion": CORE | {"after_commits", "demote", "demote_policy", "policies"},
    "demoting": CORE | {"automatic_demotion", "background", "demote", "demote_plan", "demote_policy", "diff"},
    # What other tools have saved, and what is left of what was damaged.
    "importing": CORE | {"adapters", "capture", "info", "receipt"},
    "importer": CORE | {"arguments", "background", "commit", "importing", "info", "receipt"},
    "repair_search": CORE,
    "repair_plan": CORE | {"repair_search"},
    "repair_copies": CORE | {"repair_plan", "repair_search"},
    "repair": CORE | {"repair_copies", "repair_plan", "repair_search"},
    "repairing": CORE | {"background", "decoder", "repair"},
    # A page of what manifests say.
    "report": CORE | {"collection", "info", "listing", "stats"},
    "reporting": CORE | {"collection", "handle", "report"},
    # It tells the story of a commit in another process, with what a handle remembers in this one.
    "saver": GROUND
    | {"format", "io", "store", "plan", "survey", "bases", "stale", "receipt", "commit", "history", "policies"},
    # The trainer's end of a background commit: from captured tensors to a slot that the saver was told of.
    "staging": CORE | {"saver", "adapters"},
    "pending": {"clock", "errors", "receipt"},
    "handed": CORE | {"pending", "saver", "staging"},
    "handover": CORE | {"handed", "pending", "receipt", "saver", "staging"},
    # When to commit: arithmetic, what it is fed with, and signals.
    "advice": {"errors"},
    "interval": {"advice", "arguments", "clock", "errors"},
    "signals": {"advice", "arguments", "clock", "errors"},
    "advising": {"advice", "errors", "handle", "interval", "signals", "store"},
    "background": CORE
    | {"adapters", "advising", "arguments", "bases", "handed", "handle", "handover", "pending", "saver", "stale"},
    "handle": CORE | {"contents", "coding", "stats", "info", "decoder", "chain_reader"},
    "api": CORE
    | {
        "arguments",
        "demoting",
        "importer",
        "keeping",
        "repairing",
        "reporting",
        "tiering",
        "background",
        "bases",
        "handle",
        "contents",
        "commit",
        "restore",
        "history",
        "receipt",
        "repack",
        "info",
        "stale",
        "saver",
        "fetch",
        "adapters",
    },
    "adapters": GROUND | {"api", "outfile"},
    # What the command line shows; functions of the library like the others.
    "listing": CORE | {"info"},
    "contents": GROUND | {"format", "info"},
    "diagnosis": CORE,
    "outfile": GROUND | {"io"},
    "cli": GROUND
    | {"api", "adapters", "info", "receipt", "listing", "contents", "diagnosis", "outfile"}
    | {"keeping", "collection", "retention"}
    | {"importer", "importing", "repair", "store"}
    | {"coding", "stats", "repack", "demote", "demote_plan", "diff", "quant"},
    "__main__": {"cli"},
    "__init__": {"retention"}
    | {"advice", "interval"}
    | {"quant", "train_state", "api", "config", "errors", "info", "receipt", "retention", "values"},
}
"""Part to parts it may import, from the table of STYLE.md; a part is the first name below ``ckstore``."""

DOORS = {
    "blake3": {"ids.py"},
    "xxhash": {"format/wire.py"},
    "msgspec": {"format/records.py"},
    "zstandard": {"codec/zstd.py"},
    "lz4": {"codec/lz4.py"},
    "liburing": {"io/engine_uring.py"},
    "obstore": {"io/remote.py"},
    "typer": {"cli/"},
    "rich": {"cli/output.py"},
    "torch": {"adapters/", "kernels/on_gpu.py", "kernels/directions_on_gpu.py"},
    "safetensors": {"adapters/"},
    "time": {"clock.py"},
    # obstore takes its patience as timedeltas; nobody looks at a clock there.
    "datetime": {"cli/", "io/remote.py"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
    "cloudpickle": set(),
    "asyncio": set(),
}
LAZY = {(part, "adapters") for part in ("api", "background", "cli", "staging", "importing")} | {("adapters", "api")}
LAZY.add(("lossy_chunks", "lossy_device_task"))  # That loads torch, which the saver never does.
"""Imports that may stand inside functions only."""


def modules():
    """Return every module of the package but the shipped test tools, by its path below ``ckstore``."""
    return [path for path in sorted(SRC.rglob("*.py")) if path.relative_to(SRC).parts[0] != "testing"]


def everything():
    """Return every Python file that the limits hold for."""
    places = ("src", "tests", "bench", "examples")
    return [path for place in places for path in sorted((ROOT / place).rglob("*.py")) if ".venv" not in path.parts]


def tree_of(path):
    return ast.parse(path.read_text(), filename=str(path))


def at(path, line, what):
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def check(breaches):
    assert not breaches, "\n" + "\n".join(breaches)


def part_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(tree):
    """Yield line, dotted name and whether it stands in a function, of every import that runs."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for_types_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            yield node.lineno, name, id(node) in inside, id(node) in for_types_only


def import_breaches(path, tree):
    """Yield every import that the table or a door forbids."""
    here, part = path.relative_to(SRC).as_posix(), part_of(path)
    assert part in ALLOWED, f"{here} has no row in the import table"
    for line, name, is_lazy, is_for_types in imports_of(tree):
        top, *rest = name.split(".")
        if top == "ckstore" and rest:
            if rest[0] == "_native":
                if here != "kernels/on_native.py":
                    yield line, f"imports {name}; its door is kernels/on_native.py"
            elif rest[0] == "testing":
                yield line, "imports ckstore.testing"
            elif rest[0] in ALLOWED and rest[0] != part and rest[0] not in ALLOWED[part]:
                if not is_for_types:
                    yield line, f"{part} may not import {rest[0]}"
            elif (part, rest[0]) in LAZY and not (is_lazy or is_for_types):
                yield line, f"{part} may import {rest[0]} only inside a function"
        elif top in DOORS and not is_at_door(here, DOORS[top]):
            yield line, f"imports {top}; its doors are {sorted(DOORS[top])}"


def is_at_door(here, doors):
    return any(here == door or (door.endswith("/") and here.startswith(door)) for door in doors)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(SRC).as_posix())
def test_imports_follow_the_table_and_the_doors(path):
    check([at(path, line, what) for line, what in import_breaches(path, tree_of(path))])


def test_import_rules_find_a_breach():
    tree = ast.parse("import time\nfrom ckstore.codec import chain\nfrom ckstore.io.local import LocalBackend")
    found = [what for _, what in import_breaches(SRC / "store" / "known.py", tree)]
    assert found == ["imports time; its doors are ['clock.py']", "store may not import codec"]


def test_functions_and_files_keep_their_limits():
    breaches = []
    for path in everything():
        lines = path.read_text().splitlines()
        if len(lines) > FILE_LINES_MAX:
            breaches.append(at(path, len(lines), f"a file has at most {FILE_LINES_MAX} lines"))
        breaches += [
            at(path, number, f"a line has at most {COLUMNS_MAX} columns")
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS_MAX
        ]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    breaches.append(at(path, node.lineno, f"{node.name} has {length} lines"))
    check(breaches)


def test_every_module_begins_with_its_charter():
    breaches = []
    for path in everything():
        charter = ast.get_docstring(tree_of(path)) or ""
        first = charter.split("\n\n")[0].replace("\n", " ")
        if not re.match(r"[A-Za-z`].{15,}[.:?]$", first, re.DOTALL):
            breaches.append(at(path, 1, "a module begins with a sentence that says what it is for"))
    check(breaches)


def test_nothing_prints_but_the_command_line():
    breaches = [
        at(path, node.lineno, "print belongs to cli")
        for path in modules()
        if part_of(path) != "cli"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    check(breaches)


def test_nothing_is_left_for_later():
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    breaches = [
        at(path, number, "nothing is left for later")
        for path in everything()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    check(breaches)


FORBIDDEN_WORDS = re.compile(r"(?i)(snapshot|blob|manager|handler|helper|util)")


def test_names_use_the_words_of_the_glossary():
    breaches = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            name = getattr(node, "name", None) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            if name and FORBIDDEN_WORDS.search(name):
                breaches.append(at(path, node.lineno, f"{name} uses a word that is not ours"))
    check(breaches)


def test_public_functions_have_docstrings():
    breaches = []
    for path in modules():
        for node in tree_of(path).body:
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and ast.get_docstring(node) is None:
                breaches.append(at(path, node.lineno, f"{node.name} has no docstring"))
    check(breaches)


def test_code_runs_on_the_oldest_python():
    # Names that are younger than Python 3.10, and have been written by mistake elsewhere.
    young = {"Self", "ExceptionGroup", "BaseExceptionGroup", "tomllib", "StrEnum", "assert_never", "LiteralString"}
    breaches = []
    for path in modules():
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        for line, name, *_ in imports_of(tree):
            if name.split(".")[-1] in young and not name.startswith("typing_extensions"):
                breaches.append(at(path, line, f"{name} is younger than Python 3.10"))
        breaches += [
            at(path, node.lineno, "except* is younger than Python 3.10")
            for node in ast.walk(tree)
            if type(node).__name__ == "TryStar"
        ]
    check(breaches)
