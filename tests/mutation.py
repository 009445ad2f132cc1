"""Change one statement of a module at a time, and count how many changes the tests notice.

    git clone . /tmp/mutants && make -C /tmp/mutants .venv/.installed
    python tests/mutation.py /tmp/mutants --count 12 --result fast.json
    python tests/mutation.py /tmp/mutants --survivors fast.json --depth all --result deep.json

The tree is a clone with an environment of its own: its source is changed in place and put back, never that of the
checkout. Which changes are made follows from the seed and from the changed text, so that two versions of a module get
the same changes where their code is the same. A change is *killed* by tests that fail or run into the time limit.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MODULES: dict[str, list[str]] = {
    "commit.py": ["unit/commit", "integration/test_promises.py", "durability/test_failing_calls.py"],
    "chunks.py": ["unit/commit", "integration/test_promises.py", "unit/restore", "durability/test_failing_calls.py"],
    "store/manifests.py": ["unit/store", "durability/test_failing_calls.py", "durability/test_power_cut_states.py"],
    "store/lease.py": ["unit/store", "unit/background/test_lent_lease.py", "integration/background/test_lost_lease.py"],
    "store/gc.py": ["unit/ops/gc", "durability/test_collection.py", "durability/test_gc_races.py"],
    "store/drop.py": ["unit/ops/gc", "unit/store", "integration/test_history.py", "durability/test_collection.py"],
    "store/packer.py": ["unit/store", "unit/commit", "durability/test_failing_calls.py"],
    "format/frame.py": ["unit/format", "golden", "hostile"],
    "format/manifest.py": ["unit/format", "golden", "hostile"],
    "saver/server.py": ["unit/background", "integration/background"],
    "saver/arena.py": ["unit/background", "integration/background"],
}
"""Modules, below ``src/ckstore``, and the tests that concern each, below ``tests``, the nearest first."""

SWAPPED: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

LOGGING = ("_log.", "tell(", "warnings.")
"""Statements that begin like this only report."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one statement.

    Attributes:
        module: Below ``src/ckstore``.
        function: Where the statement is.
        line: Its first line, counted from 1.
        before: Its text, on one line.
        after: Its text when it is changed.
    """

    module: str
    function: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """What stays the same when other code of the module changes."""
        return f"{self.module}:{self.function}:{self.before}:{self.after}"


def variants(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement with one thing in it changed, for each thing that can be."""
    if isinstance(node, (ast.Expr, ast.Raise)):
        yield ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))
    if isinstance(node, (ast.Break, ast.Continue)):
        yield ast.Break() if isinstance(node, ast.Continue) else ast.Pass()
    # Of a compound statement only its head: what is inside is a statement of its own.
    for path in _expressions(node):
        yield from _changed(node, path)


def _expressions(node: ast.stmt) -> list[str]:
    fields = [name for name, value in ast.iter_fields(node) if isinstance(value, ast.expr)]
    return [name for name in fields if name not in ("annotation", "target", "returns", "exc", "cause")]


def _changed(node: ast.stmt, name: str) -> Iterator[ast.stmt]:
    if isinstance(node, (ast.If, ast.While)) and name == "test":
        yield _with(node, name, ast.UnaryOp(ast.Not(), node.test))
    count = sum(1 for _ in ast.walk(getattr(node, name)))
    for index in range(count):
        expression = copy.deepcopy(getattr(node, name))
        part = next(found for number, found in enumerate(ast.walk(expression)) if number == index)
        if _change(part):
            yield _with(node, name, expression)


def _with(node: ast.stmt, name: str, expression: ast.expr) -> ast.stmt:
    changed = copy.copy(node)
    setattr(changed, name, expression)
    return changed


def _change(part: ast.AST) -> bool:
    """Change one part of an expression in place; return whether there is something to change."""
    if isinstance(part, ast.Compare) and type(part.ops[0]) in SWAPPED:
        part.ops[0] = SWAPPED[type(part.ops[0])]()
    elif isinstance(part, (ast.BinOp, ast.BoolOp)) and type(part.op) in SWAPPED:
        part.op = SWAPPED[type(part.op)]()  # type: ignore[assignment]
    elif isinstance(part, ast.Constant) and isinstance(part.value, bool):
        part.value = not part.value
    elif isinstance(part, ast.Constant) and isinstance(part.value, int):
        part.value += 1
    elif isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        part.op, part.operand = ast.Not(), ast.UnaryOp(ast.Not(), part.operand)
    else:
        return False
    return True


def statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements in functions, with the names of these; no docstrings, logging, or code for types only."""

    def walk(body: list[ast.stmt], path: str) -> Iterator[tuple[str, ast.stmt]]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if node.name != "__repr__":
                    yield from walk(node.body, f"{path}.{node.name}".lstrip("."))
                continue
            text = ast.unparse(node)
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if path and not is_text and not text.startswith(LOGGING):
                yield path, node
            for field in ("body", "orelse", "finalbody"):
                yield from walk(getattr(node, field, []), path)
            for handler in getattr(node, "handlers", []):
                yield from walk(handler.body, path)

    return walk(tree.body, "")


def head_of(node: ast.stmt) -> str:
    """Return a statement's text on one line, of a compound one its first line."""
    return ast.unparse(node).split("\n")[0]


def mutants_of(tree: Path, module: str, count: int, seed: int) -> list[tuple[Mutant, ast.stmt, ast.stmt]]:
    """Choose some changes, at most two in a function, by a hash of the seed and of what is changed."""
    parsed = ast.parse((tree / "src" / "ckstore" / module).read_text())
    found = {
        mutant.key: (mutant, node, changed)
        for path, node in statements(parsed)
        for changed in variants(node)
        if (mutant := Mutant(module, path, node.lineno, head_of(node), head_of(changed))).before != mutant.after
    }
    chosen, by_function = [], Counter[str]()
    for key in sorted(found, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest()):
        function = found[key][0].function
        if by_function[function] < 2 and len(chosen) < count:
            by_function[function] += 1
            chosen.append(found[key])
    return chosen


def changed_source(source: str, node: ast.stmt, changed: ast.stmt) -> str:
    """Return a module's source with one statement, or the head of a compound one, written anew."""
    lines = source.split("\n")
    body = getattr(node, "body", None)
    end = node.end_lineno if not body else body[0].lineno - 1
    assert end is not None
    indent = " " * node.col_offset
    text = head_of(changed) if body else ast.unparse(changed).replace("\n", f"\n{indent}")
    if body and end < node.lineno:
        raise ValueError("a compound statement on one line")
    # A branch "elif" begins where its "if" is counted from.
    prefix = "el" if lines[node.lineno - 1].strip().startswith("elif") else ""
    lines[node.lineno - 1 : end] = [indent + prefix + text]
    return "\n".join(lines)


def run_tests(tree: Path, paths: list[str], depth: str, limit: float, *, extra: list[str]) -> str:
    """Run tests until one fails; return "killed", "killed by the time limit" or "survived"."""
    command = [str(tree / ".venv" / "bin" / "python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "2"]
    command += [f"--depth={depth}"] if depth else []
    command += [*extra, *(f"tests/{path}" for path in paths if (tree / "tests" / path).exists())]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return "killed by the time limit"
    if done.returncode not in (0, 1, 2):
        raise SystemExit(done.stdout[-3000:] + done.stderr[-1000:])
    return "killed" if done.returncode else "survived"


def check_module(tree: Path, module: str, arguments: argparse.Namespace, wanted: set[str] | None) -> list[dict]:
    """Try the changes of one module; return a row for each."""
    paths = (arguments.tests or {}).get(module, MODULES[module])
    mutants = mutants_of(tree, module, arguments.count if wanted is None else 10**6, arguments.seed)
    mutants = [each for each in mutants if wanted is None or each[0].key in wanted]
    if not mutants:
        return []
    began = time.monotonic()
    if run_tests(tree, paths, arguments.depth, 3600, extra=arguments.extra) != "survived":
        raise SystemExit(f"{module}: its tests fail without any change")
    limit = 60 + 3 * (time.monotonic() - began)
    file, rows = tree / "src" / "ckstore" / module, []
    source = file.read_text()
    for mutant, node, changed in mutants:
        try:
            file.write_text(changed_source(source, node, changed))
            outcome = run_tests(tree, paths, arguments.depth, limit, extra=arguments.extra)
        except ValueError:
            continue
        finally:
            file.write_text(source)
        rows.append({**asdict(mutant), "key": mutant.key, "outcome": outcome})
        print(f"{outcome:9.9} {module}:{mutant.line} {mutant.before[:70]!r} -> {mutant.after[:70]!r}", flush=True)
    return rows


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="a clone with an environment of its own")
    parser.add_argument("--module", action="append", choices=list(MODULES), help="only this one; may be repeated")
    parser.add_argument("--count", type=int, default=12, help="changes a module (12)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--depth", default="sample", help="of long programmes; empty where the suite has none")
    parser.add_argument("--survivors", type=Path, help="only those that survived in this result")
    parser.add_argument("--tests", type=json.loads, help="a JSON object: module to test paths, instead of the table")
    parser.add_argument("--extra", action="append", default=[], help="one more argument for pytest; may be repeated")
    parser.add_argument("--result", type=Path, default=Path("mutants.json"))
    arguments = parser.parse_args()
    if arguments.tree.resolve() == Path(__file__).resolve().parents[1]:
        parser.error("the tree is the checkout itself; give a clone of it")
    wanted = None
    if arguments.survivors:
        wanted = {row["key"] for row in json.loads(arguments.survivors.read_text()) if row["outcome"] == "survived"}
    rows: list[dict] = []
    for module in arguments.module or MODULES:
        rows += check_module(arguments.tree, module, arguments, wanted)
        arguments.result.write_text(json.dumps(rows, indent=1))
    for module in dict.fromkeys(row["module"] for row in rows):
        outcomes = Counter(row["outcome"] != "survived" for row in rows if row["module"] == module)
        print(f"{module:20} {outcomes[True]:3} killed, {outcomes[False]:3} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
