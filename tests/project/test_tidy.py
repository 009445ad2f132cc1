"""The style rules as tests: imports, wrapper modules of libraries, limits, docstrings.

A number in this file changes only in a commit that explains why.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from pathlib import Path

import pytest

from support.import_rules import ALLOWED

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "ckstore"
FUNCTION_LINES_MAX, FILE_LINES_MAX, COLUMNS_MAX = 60, 600, 120
LONG_FILES = {
    "api.py": (1700, "one short method for each verb of a store, most of it signatures and docstrings"),
    "config.py": (900, "every setting of a store in one place"),
    "format/tree.py": (700, "nodes, their paths and their encoding"),
    "background/commits.py": (900, "one life cycle, from submitting to the receipt"),
    "ops/demote.py": (900, "plan and work of one verb"),
    "ops/repack_plan.py": (900, "plan and estimates of one verb"),
}
"""Files that may be longer than others: their limit, and the reason."""

LIGHTNING = {"integrations/lightning.py", "integrations/exact_resume.py"}
DCP = {f"ranks/dcp_{name}.py" for name in ("planner", "reader", "targets", "writer")}
DOORS = {
    "blake3": {"hashing.py"},
    "xxhash": {"format/wire.py"},
    "msgspec": {"format/records.py"},
    "zstandard": {"format/zstd.py"},
    "lz4": {"codec/byte_codecs.py"},
    "liburing": {"io/uring_engine.py"},
    "obstore": {"io/remote/client.py"},
    "typer": {"cli/"},
    "rich": {"cli/render.py"},
    "torch": {
        "state/torch_adapter.py",
        "state/torch_objects.py",
        "state/torch_shards.py",
        "state/shard_adapters.py",
        "dcp.py",
        *DCP,
        "background/cuda.py",
        "background/optimizer_guard.py",
        "journal/",
        "integrations/",
        "ranks/world.py",
        "ops/interop/",
    },
    "safetensors": {"ops/interop/"},
    "accelerate": {"integrations/accelerate.py", "integrations/transformers.py"},
    "transformers": {"integrations/transformers.py"},
    "lightning": LIGHTNING,
    "lightning_fabric": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
    "omegaconf": {"integrations/leaves.py"},
    "time": {"clock.py"},
    # obstore and torch's store take timeouts as timedeltas; they read no clock.
    "datetime": {
        "cli/",
        "io/remote/client.py",
        "ranks/world.py",
        "state/standard_types.py",
        "ops/interop/plain_fields.py",
    },
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
    "dill": set(),
    "cloudpickle": set(),
    "asyncio": set(),
}
TORCH_MODULES = {
    "ckstore.dcp",
    *(f"ckstore.{name.removesuffix('.py').replace('/', '.')}" for name in DCP),
    "ckstore.state.torch_adapter",
    "ckstore.state.torch_objects",
    "ckstore.state.torch_shards",
    "ckstore.state.shard_adapters",
    "ckstore.background.cuda",
    "ckstore.background.optimizer_guard",
    "ckstore.ops.interop.torch_files",
}
"""Imported inside functions by modules that work without torch, or by each other."""


LAZY = {
    "api.py": "opening and listing a store loads neither numpy nor torch",
    "background/saver/committer.py": "the saver of one process loads no connections between ranks",
    "cli/": "a command loads only what it needs",
    "background/saver/server.py": "a saver of commits loads no journal",
    "format/location.py": "listing a store reads the names of tiers, which are never compressed",
    "journal/history.py": "a restore without points loads no replay",
    "opening.py": "opening a store of one process loads no ranks",
    "ops/commit.py": "an exact commit loads neither quantization nor collection",
    "ops/interop/child.py": "only files of torch load torch",
    "ops/scheduled.py": "a store that is opened without demotion does not load it",
    "ranks/commits.py": "only a full disk loads the collector",
    "results.py": "listing a store loads no tree",
    "store/manifests.py": "listing a store reads headers, and loads no manifest decoder",
    "store/replay_bases.py": "the same",
    "store/repository.py": "the same",
}
"""Modules that import modules of ckstore inside functions, and why. Optional libraries are in DOORS."""
OPTIONAL = {"ckstore.io.remote.backend", "ckstore.io.uring_engine", *TORCH_MODULES}
"""Modules that load an optional or heavy library; any module may import them inside a function."""


def modules():
    """Return every module of the package."""
    return sorted(SRC.rglob("*.py"))


def all_files():
    """Return every Python file to which the limits apply."""
    places = ("src", "tests", "bench", "examples")
    return [path for place in places for path in sorted((ROOT / place).rglob("*.py")) if ".venv" not in path.parts]


@functools.cache
def text_of(path):
    return path.read_text()


@functools.cache
def tree_of(path):
    """Return the syntax tree of a file. Syntax newer than Python 3.10 is an error."""
    return ast.parse(text_of(path), filename=str(path), feature_version=(3, 10))


@functools.cache
def nodes_of(path):
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection():
    """Disable the garbage collector: it would visit the syntax trees again and again, for 80 % of the run time."""
    gc.disable()
    yield
    for cached in (text_of, tree_of, nodes_of, imports_of):
        cached.cache_clear()
    gc.enable()


def at(path, line, what):
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def check(breaches):
    assert not breaches, "\n" + "\n".join(breaches)


def part_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@functools.cache
def imports_of(tree):
    """Return line, dotted name, and whether it is in a function or only for types, of every import."""
    return tuple(_imports_below(tree, is_lazy=False, is_for_types=False))


def _imports_below(node, *, is_lazy, is_for_types):
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, is_lazy, is_for_types
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            yield node.lineno, f"{node.module}.{alias.name}", is_lazy, is_for_types
    is_lazy |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    typed = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else ()
    for child in ast.iter_child_nodes(node):
        # An import is a statement, so expressions need not be searched.
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _imports_below(child, is_lazy=is_lazy, is_for_types=is_for_types or child in typed)


def import_breaches(path, tree):
    """Yield every import that the table or a wrapper rule forbids."""
    here, part = path.relative_to(SRC).as_posix(), part_of(path)
    loads_torch = f"ckstore.{here.removesuffix('.py').replace('/', '.')}" in TORCH_MODULES
    assert part in ALLOWED, f"{here} has no row in the import table"
    for line, name, is_lazy, is_for_types in imports_of(tree):
        top, *rest = name.split(".")
        if top == "ckstore" and rest:
            if rest[0] == "_native":
                if here != "codec/kernels/__init__.py":
                    yield line, f"imports {name}; its door is codec/kernels/__init__.py"
            elif rest[0] in ALLOWED and rest[0] != part and rest[0] not in ALLOWED[part]:
                if not is_for_types:
                    yield line, f"{part} may not import {rest[0]}"
            elif name.rpartition(".")[0] in TORCH_MODULES and not (is_lazy or is_for_types or loads_torch):
                yield line, f"{here} may import {name} only inside a function"
        elif top in DOORS and not is_at_door(here, DOORS[top]):
            yield line, f"imports {top}; its doors are {sorted(DOORS[top])}"


def module_imported(name):
    """Return the module of ckstore that an imported name is, or is in; None for another library."""
    for candidate in (name, name.rpartition(".")[0]):
        place = SRC.parent / candidate.replace(".", "/")
        if candidate.startswith("ckstore") and (
            place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
        ):
            return candidate
    return None


def lazy_breaches(path, tree):
    """Yield every import inside a function that has no entry in LAZY."""
    here = path.relative_to(SRC).as_posix()
    for line, name, is_lazy, is_for_types in imports_of(tree):
        module = module_imported(name)
        if module and is_lazy and not is_for_types and module not in OPTIONAL and not is_at_door(here, LAZY):
            yield line, f"import {module} at the top of the module, or give a reason in LAZY"


def test_imports_are_at_the_top_of_modules():
    check([at(path, line, what) for path in modules() for line, what in lazy_breaches(path, tree_of(path))])
    hidden = ast.parse("def load():\n    from ckstore.format import manifest")
    assert len(list(lazy_breaches(SRC / "store" / "tags.py", hidden))) == 1


def cycle_in(graph):
    """Return the modules of one import cycle, or an empty list."""
    state, stack = {}, []

    def visit(module):
        state[module] = "open"
        stack.append(module)
        for other in sorted(graph[module]):
            if state.get(other) == "open":
                return stack[stack.index(other) :]
            if other not in state and (found := visit(other)):
                return found
        state[module] = "done"
        stack.pop()
        return []

    return next((found for module in sorted(graph) if module not in state and (found := visit(module))), [])


def test_imports_have_no_cycle():
    graph = {}
    for path in modules():
        name = "ckstore." + path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".")
        imported = {module_imported(found) for _, found, *_ in imports_of(tree_of(path))}
        graph[name.removesuffix(".__init__")] = imported - {None, name, name.removesuffix(".__init__")}
    del graph["ckstore"]
    graph = {name: imported & graph.keys() for name, imported in graph.items()}
    assert cycle_in(graph) == []
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def is_at_door(here, doors):
    return any(here == door or (door.endswith("/") and here.startswith(door)) for door in doors)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(SRC).as_posix())
def test_imports_follow_the_rules(path):
    check([at(path, line, what) for line, what in import_breaches(path, tree_of(path))])


def test_import_rules_find_a_breach():
    tree = ast.parse("import time\nfrom ckstore.codec import planes\nfrom ckstore.io.local import LocalBackend")
    found = [what for _, what in import_breaches(SRC / "store" / "chunk_index.py", tree)]
    assert found == ["imports time; its doors are ['clock.py']", "store may not import codec"]


def test_functions_and_files_respect_limits():
    breaches = []
    for path in all_files():
        lines = text_of(path).splitlines()
        name = path.relative_to(SRC).as_posix() if path.is_relative_to(SRC) else ""
        lines_max, _ = LONG_FILES.get(name, (FILE_LINES_MAX, ""))
        if len(lines) > lines_max:
            breaches.append(at(path, len(lines), f"a file has at most {lines_max} lines"))
        breaches += [
            at(path, number, f"a line has at most {COLUMNS_MAX} columns")
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS_MAX
        ]
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    breaches.append(at(path, node.lineno, f"{node.name} has {length} lines"))
    check(breaches)


def test_every_module_has_a_docstring():
    breaches = []
    for path in all_files():
        charter = ast.get_docstring(tree_of(path)) or ""
        first = charter.split("\n\n")[0].replace("\n", " ")
        if not re.match(r"[A-Za-z`].{15,}[.:?]$", first, re.DOTALL):
            breaches.append(at(path, 1, "a module begins with a sentence that says what it is for"))
    check(breaches)


def test_only_the_command_line_prints():
    breaches = [
        at(path, node.lineno, "print belongs to cli")
        for path in modules()
        if part_of(path) != "cli"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    check(breaches)


def test_no_unfinished_code_markers():
    mark = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    breaches = [
        at(path, number, "nothing is left for later")
        for path in all_files()
        if path != Path(__file__)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if mark.search(line)
    ]
    check(breaches)


def test_public_functions_have_docstrings():
    breaches = []
    for path in modules():
        for node in tree_of(path).body:
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and ast.get_docstring(node) is None:
                breaches.append(at(path, node.lineno, f"{node.name} has no docstring"))
    check(breaches)


def test_code_runs_on_python_3_10():
    # Names that are newer than Python 3.10 and are easily used by mistake.
    young = {"Self", "ExceptionGroup", "BaseExceptionGroup", "tomllib", "StrEnum", "assert_never", "LiteralString"}
    breaches = []
    for path in modules():
        for line, name, *_ in imports_of(tree_of(path)):
            if name.split(".")[-1] in young and not name.startswith("typing_extensions"):
                breaches.append(at(path, line, f"{name} is younger than Python 3.10"))
        breaches += [
            at(path, node.lineno, "except* is younger than Python 3.10")
            for node in nodes_of(path)
            if type(node).__name__ == "TryStar"
        ]
    check(breaches)
