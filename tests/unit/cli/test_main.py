"""Protects how the command line starts, ends and reports errors: imports, exit codes, hostile names, terminals."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import ckstore
from ckstore.cli import main, render
from ckstore.cli.parser import COMMANDS
from support.cli_stores import ckstore_command, environment, make_store, on_terminal

ESCAPE = "\x1b[31mred\x1b[0m\nsecond line\u202e"

PROBE = """
import json, sys
from ckstore.cli.main import run
for arguments in json.loads(sys.argv[1]):
    code = run(arguments)
    loaded = [name for name in ("torch", "numpy", "typer", "rich", "safetensors") if name in sys.modules]
    print("\\nLOADED", code, *loaded, file=sys.stderr)
"""


def loaded_by(*commands):
    """Run commands in one new process, and return the libraries that are loaded after each."""
    texts = json.dumps([[str(argument) for argument in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROBE, texts],
        capture_output=True, text=True, env=environment(), stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    loaded = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    assert [code for code, *_ in loaded] == ["0"] * len(commands), done.stderr
    return [set(names) for _, *names in loaded]


def test_ls_loads_no_heavy_library(readonly_store):
    plain, as_json, parsed = loaded_by(
        ["ls", readonly_store],
        ["ls", readonly_store, "--json", "-n", 1, "--run", "main"],
        ["ls", "--run=main", readonly_store],
    )
    assert plain == as_json == set()
    assert parsed == {"typer"}


SLOW = {
    "blake3", "ctypes", "dataclasses", "datetime", "inspect", "json", "logging", "msgspec", "numpy", "pathlib", "re",
    "rich", "safetensors", "socket", "threading", "torch", "traceback", "typer", "typing", "typing_extensions",
}  # fmt: skip
"""Modules whose import takes long, compared with starting Python."""


def slow_modules_after(program, *arguments):
    """Run a program in a new process, and return the slow modules that it has loaded."""
    show = "import sys\nprint('LOADED', *sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\n{show}", *map(str, arguments)],
        capture_output=True, text=True, env=environment(), stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    return SLOW.intersection(done.stderr.partition("LOADED ")[2].split())


def test_import_loads_no_slow_module():
    assert slow_modules_after("import ckstore") <= slow_modules_after("pass")


@pytest.mark.parametrize(("option", "loaded"), [([], set()), (["--json"], {"json", "re", "datetime"})])
def test_ls_of_plain_store_loads_no_slow_module(readonly_store, option, loaded):
    program = "from ckstore.cli.main import run\nassert run(['ls', *sys.argv[1:]]) == 0"
    assert slow_modules_after(program, readonly_store, *option) <= slow_modules_after("pass") | loaded


def test_help_loads_the_parser_only():
    assert loaded_by(["--help"], ["gc", "--help"], ["show", "--help"]) == [{"typer"}] * 3


def test_no_command_loads_torch(store, tmp_path):
    calls = {
        "init": [tmp_path / "new"],
        "status": [store, "--max-age", "99y"],
        "du": [store],
        "show": [store, "--codec"],
        "stats": [store],
        "verify": [store, "--level", "decode"],
        "restore": [store, "-o", tmp_path / "x.npz"],
        "export": [store, "latest", "-o", tmp_path / "x.safetensors"],
        "import": [tmp_path / "imported", tmp_path / "x.safetensors", "--step", "1"],
        "tag": [store, "latest", "x"],
        "untag": [store, "x"],
        "delete": [store, "100", "--yes"],
        "rewind": [store, "200"],
        "repack": [store],
        "diff": [store, "200"],
        "demote": [store],
        "gc": [store, "--keep-last", "2"],
        "trash": ["ls", store],
        "undelete": [store, "100"],
        "push": [store, tmp_path / "tier"],
        "pull": [store],
        "mirror": [store, tmp_path / "copy"],
        "quarantine": [store],
        "repair": [store],
        "report": [store, "-o", tmp_path / "x.html"],
        "adopt": [store, "--as-original"],
        "doctor": [store],
        "bench": [tmp_path, "--size", "16"],
    }
    assert set(calls) == set(COMMANDS) - {"ls"}
    loaded = loaded_by(*([name, *arguments] for name, arguments in calls.items()))
    # All run in one process, in sequence: the first one that loads something is the one to fix.
    for name, found in zip(calls, loaded, strict=True):
        assert found & {"torch", "rich", "safetensors"} == set(), name


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_eighty_columns(call, name):
    code, out, err = call(*[name] if name else [], "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: ckstore{' ' if name else ''}{name}")
    assert max(map(len, out.splitlines())) <= 80
    assert "\\b" not in out
    assert "..." not in out.split("Commands:")[-1] or name in ("delete", "demote", "pull", "trash", "undelete")


def test_no_arguments_print_help_and_fail(call):
    code, out, _ = call()
    assert code == 2
    assert "Commands:" in out


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["ls"], ["ls", "x", "--colour"], ["show", "a", "b", "c", "d"], ["ls", "x", "-n", "-1"]],
)
def test_mistakes_are_one_line_on_stderr_and_exit_2(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ckstore: ")
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ckstore.NotFoundError("x"), 10),
        (ckstore.CapacityError("x"), 14),
        (ckstore.BackendError("x"), 15),
        (RuntimeError(ESCAPE), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(call, monkeypatch, error, code):
    def fail(arguments):
        raise error

    monkeypatch.setattr("ckstore.cli.ls.quick", fail)
    found, out, err = call("ls", "x")
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "Traceback" not in err


def test_debug_shows_where_an_error_came_from(call, tmp_path):
    code, _, err = call("--debug", "ls", tmp_path / "nowhere")
    assert code == 10
    assert "Traceback" in err


def test_closed_pipe_prints_no_error(readonly_store):
    list_first = f"'{sys.executable}' -m ckstore ls '{readonly_store}' --json | head -c 1"
    done = subprocess.run(
        ["bash", "-c", list_first + "; exit ${PIPESTATUS[0]}"],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"]])
@pytest.mark.parametrize("as_terminal", [False, True])
def test_text_from_a_store_cannot_control_the_terminal(tmp_path, command, as_terminal):
    path = tmp_path / "store"
    with ckstore.open(path) as store:
        store.commit({ESCAPE: np.arange(9), "[bold]x": np.arange(3.0)}, 1, metrics={ESCAPE: 1.0})
    if as_terminal:
        code, out = on_terminal(200, *command, path)
        assert "\x1b[31mred" not in out
    else:
        done = ckstore_command(*command, path)
        code, out = done.returncode, done.stdout
        assert "\x1b" not in out
    assert code == 0
    assert "\u202e" not in out
    assert "\nsecond" not in out
    if command == ["show"]:
        assert "[bold]x" in out


def test_hostile_names_survive_as_json(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"a": np.arange(9)}, 1, metrics={ESCAPE: float("nan")})
    done = ckstore_command("ls", tmp_path / "store", "--json")
    assert "\x1b" not in done.stdout
    assert json.loads(done.stdout)["runs"][0]["entries"][0]["metrics"] == {ESCAPE: "nan"}


def test_foreign_files_in_a_store_are_ignored(store):
    for name in ("manifests/main/\x1b[31m.ckm", "manifests/\x1b[31m/x", "tags/main/\x1b[2J", "claims/main/x y"):
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_text("x")
    done = ckstore_command("ls", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("columns", [60, 80, 140, 200])
@pytest.mark.parametrize("command", ["ls", "show", "doctor"])
def test_tables_fit_the_terminal(readonly_store, columns, command):
    code, out = on_terminal(columns, command, readonly_store)
    assert code == 0
    drawn = [line for line in out.splitlines() if "│" in line or "─" in line]
    assert all(len(line) <= columns + len("\x1b[1m\x1b[0m") * line.count("\x1b") for line in drawn)
    if command == "ls":
        assert "300" in out
        assert "good" in out


def test_terminal_gets_a_short_list_pipe_the_full_one(tmp_path):
    path = make_store(tmp_path / "store", steps=range(35))
    code, out = on_terminal(120, "ls", path, "--run", "main")
    assert code == 0
    assert "... and 5 older; --limit 0 shows all" in out
    # Title, headings, 35 checkpoints, total.
    assert len(ckstore_command("ls", path, "--run", "main").stdout.splitlines()) == 38
    assert "older" not in on_terminal(120, "ls", path, "-n", "0")[1]


def test_delete_asks_on_a_terminal(store, monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda question: next(answers))
    assert main.run(["delete", str(store), "100"]) == 1
    with ckstore.open(store, create=False) as opened:
        assert opened.steps() == [100, 200, 300]
    assert main.run(["delete", str(store), "100"]) == 0
    with ckstore.open(store, create=False) as opened:
        assert opened.steps() == [200, 300]


def test_sizes_rates_and_times_are_readable():
    assert [render.size(n) for n in (0, 999, 1024, 10 << 20, 1023 << 20, 5 << 40)] == [
        "0 B", "999 B", "1.00 KiB", "10.0 MiB", "1.00 GiB", "5.00 TiB",
    ]  # fmt: skip
    assert render.size(None) == "-"
    assert render.rate(1 << 30, 2.0) == "512 MiB/s"
    assert [render.duration(s) for s in (0.314, 42.4, 200.0)] == ["0.31 s", "42 s", "3 min 20 s"]
    assert (render.ratio(310, 100), render.ratio(5, 0)) == ("3.10x", "-")
    assert render.local_time(1 << 80) == f"{1 << 80} ns"
    assert render.iso_time(0) == "1970-01-01T00:00:00.000+00:00"


def test_ls_reads_each_header_once(tmp_path, monkeypatch):
    path = make_store(tmp_path / "store")
    from ckstore.io.local import LocalBackend
    from ckstore.store.listing import log_of_store

    heads = []
    read_head = LocalBackend.read_head
    monkeypatch.setattr(LocalBackend, "read_head", lambda self, name, n: heads.append(name) or read_head(self, name, n))
    (log,) = log_of_store(path, run="main")
    assert (len(log.entries), len(heads)) == (3, 3)
    heads.clear()
    (log,) = log_of_store(path, run="main", limit=1)
    assert (log.count, len(log.entries), len(heads)) == (3, 1, 1)


def test_fit_drops_and_shortens_columns():
    columns = [
        render.Column("a"),
        render.Column("b", worth=1),
        render.Column("c", worth=2),
        render.Column("d", worth=3, is_elastic=True),
    ]
    needs = [5, 5, 5, 40]
    has_content = [False] * 4
    assert render.fit(columns, needs, has_content, 61) == {0: 5, 1: 5, 2: 5, 3: 40}
    assert render.fit(columns, needs, has_content, 60) == {0: 5, 1: 5, 2: 5, 3: 39}
    assert render.fit(columns, needs, has_content, 37) == {0: 5, 1: 5, 2: 5, 3: 16}
    assert render.fit(columns, needs, has_content, 36) == {0: 5, 2: 5, 3: 22}
    assert render.fit(columns, needs, [False, False, True, False], 36) == {0: 5, 1: 5, 3: 22}
    assert render.fit(columns, needs, has_content, 4) == {0: 5}
