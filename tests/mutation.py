"""Change one statement of a module at a time, and count how many of the changes the tests notice.

    python tests/mutation.py --count 12 --result fast.json
    python tests/mutation.py --only-survivors fast.json --depth all --result deep.json
    python tests/mutation.py OTHER_CHECKOUT --mutants fast.json --tests tests-of-it.json --depth "" --result other.json

The changes are made in a copy of the tree, below the temporary folder, with an environment of its own that imports
``ckstore`` from the copy. The checkout is never changed, and several runs do not disturb each other.

Which changes are made follows from the seed and from the changed text. Two versions of a module therefore get the same
changes where their code is the same. A change is *killed* by tests that fail, crash or run into the time limit.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MODULES: dict[str, list[str]] = {
    "format/frame.py": ["unit/format", "golden/test_format.py", "hostile/test_parsers.py"],
    "format/manifest.py": ["unit/format", "golden/test_format.py", "hostile/test_parsers.py"],
    "store/pack_writer.py": [
        "unit/store/test_pack_writer.py",
        "unit/commit",
        "unit/store",
        "durability/test_failing_calls.py",
    ],
    "store/manifests.py": ["unit/store", "durability/test_failing_calls.py", "durability/test_power_cut_states.py"],
    "store/lease.py": ["unit/store", "unit/background/test_lease_transfer.py"],
    "store/history.py": ["unit/ops/gc", "unit/store", "integration/test_history.py", "durability/test_gc_crashes.py"],
    "ops/gc/collect.py": ["unit/ops/gc", "durability/test_gc_races.py", "durability/test_gc_crashes.py"],
    "commit/commit.py": ["unit/commit", "integration/test_regressions.py", "durability/test_failing_calls.py"],
    "commit/chunk_writer.py": [
        "unit/commit",
        "unit/restore",
        "integration/test_regressions.py",
        "durability/test_failing_calls.py",
    ],
    "background/arena.py": ["unit/background", "integration/background"],
    "background/saver/server.py": ["unit/background", "integration/background"],
}
"""Modules, below ``src/ckstore``, and the tests that concern each, below ``tests``, the nearest first."""

LEFT_OUT = (".git", ".venv", "build", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "demo-store")
"""Entries of a checkout that its copy does without."""

MARK = "CKSTORE_MUTATION_COPY"
"""Set to the copy's path in the environment of all tests, so that what they leave running can be found."""

PAIRS: list[tuple[type, type]] = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)]
PAIRS += [(ast.Is, ast.IsNot), (ast.Add, ast.Sub), (ast.And, ast.Or)]
SWAPPED: dict[type, type] = {ast.Mult: ast.FloorDiv, **dict(PAIRS), **{second: first for first, second in PAIRS}}

LOGGING = ("_log.", "log_safely(", "warnings.")
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


PlacedMutant = tuple[Mutant, ast.stmt, ast.stmt]
"""A change, the statement in a module's tree, and what replaces it."""


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


def mutants_of(tree: Path, module: str, count: int, seed: int, per_function: int) -> list[PlacedMutant]:
    """Choose some changes, at most so many in a function, by a hash of the seed and of what is changed."""
    parsed = ast.parse((tree / "src" / "ckstore" / module).read_text())
    found = {
        mutant.key: (mutant, node, changed)
        for path, node in statements(parsed)
        for changed in variants(node)
        if (mutant := Mutant(module, path, node.lineno, head_of(node), head_of(changed))).before != mutant.after
    }
    by_function, chosen = Counter[str](), list[PlacedMutant]()
    for key in sorted(found, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest()):
        function = found[key][0].function
        if by_function[function] < per_function and len(chosen) < count:
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


class Copy:
    """A copy of a checkout whose tests import ``ckstore`` from the copy.

    An editable install puts a finder before ``sys.path``, so that PYTHONPATH does not change what is imported. The copy
    therefore has an environment that links to all packages of the checkout's, except for this finder.

    Args:
        tree: The checkout, with an environment in ``.venv``.
        folder: Where to write the copy.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder, self.temporary = folder / "tree", folder / "t"
        left_out = {str(tree): LEFT_OUT}
        shutil.copytree(tree, self.folder, symlinks=True, ignore=lambda path, names: left_out.get(path, ()))
        self.temporary.mkdir()
        self.python = self._make_environment(tree / ".venv")
        self.variables = {**os.environ, MARK: str(folder), "TMPDIR": str(self.temporary)}
        self.variables["PYTHONPATH"] = str(self.folder / "src")
        self.variables.setdefault("CKSTORE_TEST_COMMIT", _commit_of(tree))
        command = [str(self.python), "-c", "import ckstore; print(ckstore.__file__)"]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=True)
        if Path(done.stdout.strip()) != self.folder / "src" / "ckstore" / "__init__.py":
            raise SystemExit(f"the tests would import {done.stdout.strip()}, not the copy")

    def _make_environment(self, real: Path) -> Path:
        made = self.folder / ".venv"
        (made / "bin").mkdir(parents=True)
        shutil.copy(real / "pyvenv.cfg", made)
        for file in (file for file in (real / "bin").iterdir() if not file.is_dir()):
            copied = made / "bin" / file.name
            shutil.copy(file, copied, follow_symlinks=False)
            if not file.is_symlink():
                # Scripts begin with the path of their interpreter.
                copied.write_bytes(file.read_bytes().replace(bytes(real), bytes(made)))
        packages = next(real.glob("lib/python*/site-packages"))
        links = made / packages.relative_to(real)
        links.mkdir(parents=True)
        for entry in packages.iterdir():
            if entry.name != "ckstore" and not entry.name.startswith("_editable_"):
                (links / entry.name).symlink_to(entry)
        (links / "ckstore_copy.pth").write_text(f"{self.folder / 'src'}\n")
        for extension in packages.glob("ckstore/_native*.so"):
            shutil.copy2(extension, self.folder / "src" / "ckstore")
        return made / "bin" / "python"

    def write(self, module: str, source: str) -> None:
        """Write a module's source, and remove what earlier tests left: bytecode of the same second, saved examples."""
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)
        file = self.folder / "src" / "ckstore" / module
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()
        file.write_text(source)

    def run_tests(self, tests: list[str], extra: list[str], limit: float) -> tuple[str, str]:
        """Run tests until one fails; return "survived" or how the change was killed, and by which test."""
        command = [str(self.python), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *extra, *tests]
        with tempfile.TemporaryFile("w+", dir=self.temporary.parent) as output:
            running = subprocess.Popen(
                command, cwd=self.folder, env=self.variables, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = running.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self._clean_up(running)
            output.seek(0)
            text = output.read()
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", text, re.MULTILINE)
        test = failed[1] if failed else ""
        if status is None:
            return "killed by the time limit", test
        if status in (4, 5):
            raise SystemExit(f"pytest found no tests:\n{text[-2000:]}")
        return ("survived" if status == 0 else "killed" if status in (1, 2) else "killed by a crash"), test

    def _clean_up(self, running: subprocess.Popen[bytes]) -> None:
        """End what the tests started, by the mark in its environment, and remove their files."""
        mark = f"{MARK}={self.variables[MARK]}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            # A process may end meanwhile, and those of other users cannot be read.
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
        running.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(exist_ok=True)


def _commit_of(tree: Path) -> str:
    """Return "NUMBER:HASH", by which the suite samples long programmes: a copy has no repository."""
    words = (["rev-list", "--count", "--first-parent", "HEAD"], ["rev-parse", "HEAD"])
    return ":".join(subprocess.check_output(["git", "-C", tree, *each], text=True).strip() for each in words)


def placed(tree: Path, module: str, rows: list[dict]) -> tuple[list[PlacedMutant], list[dict]]:
    """Find the changes of an earlier result in this tree; return them, and the rows that could not be placed."""
    everything = mutants_of(tree, module, sys.maxsize, 0, sys.maxsize)
    by_key = {each[0].key: each for each in everything}
    found, unplaced = [], []
    for row in rows:
        moved = [each for each in everything if (each[0].before, each[0].after) == (row["before"], row["after"])]
        if row["key"] in by_key:
            found.append(by_key[row["key"]])
        elif len(moved) == 1:
            found.append(moved[0])
        else:
            unplaced.append({**row, "outcome": "not placed"})
    return found, unplaced


def check_module(work: Copy, module: str, arguments: argparse.Namespace, earlier: list[dict] | None) -> Iterator[dict]:
    """Try the changes of one module; yield a row for each."""
    tests = [f"tests/{path}" for path in (arguments.tests or MODULES)[module]]
    missing = [path for path in tests if not (work.folder / path.split("::")[0]).exists()]
    if missing:
        raise SystemExit(f"no such tests: {', '.join(missing)}")
    extra = [*([f"--depth={arguments.depth}"] if arguments.depth else []), *arguments.extra]
    if earlier is None:
        mutants = mutants_of(work.folder, module, arguments.count, arguments.seed, arguments.per_function)
    else:
        mutants, unplaced = placed(work.folder, module, [row for row in earlier if row["module"] == module])
        yield from unplaced
    if not mutants:
        return
    source, began = (work.folder / "src" / "ckstore" / module).read_text(), time.monotonic()
    outcome, test = work.run_tests(tests, extra, 3600)
    if outcome != "survived":
        yield {"module": module, "line": 0, "before": "without a change", "after": "", "outcome": outcome, "test": test}
        return
    limit = 30 + 3 * (time.monotonic() - began)
    print(f"          {module}: {limit / 3 - 10:.0f} s without a change", flush=True)
    for mutant, node, changed in mutants:
        row, began = {**asdict(mutant), "key": mutant.key}, time.monotonic()
        try:
            new = changed_source(source, node, changed)
            ast.parse(new)
        except (ValueError, SyntaxError):
            yield {**row, "outcome": "not placed"}
            continue
        work.write(module, new)
        try:
            outcome, test = work.run_tests(tests, extra, limit)
            if outcome == "killed" and arguments.confirm:
                # A test that does not fail again may have been too slow on a busy machine.
                again = work.run_tests([test.split("[")[0] or tests[0]], extra, limit)[0] != "survived"
                outcome = outcome if again else "unconfirmed"
        finally:
            work.write(module, source)
        yield {**row, "outcome": outcome, "test": test, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=Path(__file__).parents[1], help="what to copy (this one)")
    parser.add_argument("--module", action="append", choices=list(MODULES), help="only this one; may be repeated")
    parser.add_argument("--count", type=int, default=20, help="changes per module (20)")
    parser.add_argument("--per-function", type=int, default=2, help="at most so many changes in a function (2)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (1)")
    parser.add_argument("--mutants", type=Path, help="the changes of an earlier result, placed by their text")
    parser.add_argument("--only-survivors", type=Path, help="the same, but only those not known to be killed")
    parser.add_argument("--depth", default="sample", help="of the suite's long programmes; empty: without this option")
    parser.add_argument("--tests", type=Path, help="a JSON file: module to test paths, instead of the table")
    parser.add_argument("--extra", action="append", default=[], help="one more argument for pytest; may be repeated")
    parser.add_argument("--confirm", action="store_true", help="run a failed test again before it counts")
    parser.add_argument("--result", type=Path, default=Path("mutants.json"))
    arguments = parser.parse_args()
    arguments.tests = json.loads(arguments.tests.read_text()) if arguments.tests else None
    earlier: list[dict] | None = None
    if source := arguments.mutants or arguments.only_survivors:
        earlier = [row for row in json.loads(source.read_text()) if row["line"]]
    if arguments.only_survivors:
        earlier = [row for row in earlier or [] if row["outcome"] in ("survived", "unconfirmed")]
    rows: list[dict] = []
    # Tests make sockets below it, whose paths are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mu", dir="/tmp", ignore_cleanup_errors=True) as folder:
        work = Copy(arguments.tree.resolve(), Path(folder))
        for module in arguments.module or MODULES:
            for row in check_module(work, module, arguments, earlier):
                rows.append(row)
                arguments.result.write_text(json.dumps(rows, indent=1))
                print(f"{row['outcome']:9.9} {module}:{row['line']} {row['before'][:70]!r} -> {row['after'][:70]!r}")
                print(f"          {row.get('test', '')} {row.get('seconds', '')}", flush=True)
    for module in dict.fromkeys(row["module"] for row in rows):
        outcomes = Counter(row["outcome"] for row in rows if row["module"] == module)
        print(f"{module:20} " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
