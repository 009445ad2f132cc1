"""Protects what an installed ckstore is to others: its metadata, its types, and a native module that runs elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

import ckstore
from support import wheels

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ckstore"

USER_SCRIPT = """
import ckstore
from ckstore import CkstoreError, ConflictError, Info, Pending, Policy, Receipt, Retention, Store


def train(folder: str, state: dict[str, object]) -> float:
    policy = Policy(compression="fast", fidelity=ckstore.Residual.near())
    retention = Retention(keep_last=3, keep_every=1000, keep_best=("loss:2",))
    with ckstore.open(folder, run="main", policy=policy, retention=retention) as store:
        if store.latest():
            state = store.restore(into=state)
        receipt: Receipt = store.commit(state, 1, metrics={"loss": 0.5}, tags=["first"])
        pending: Pending = store.commit_async(state, 2, policy=Policy())
        pending.wait_staged()
        seconds: dict[str, float] = pending.result().seconds
        return receipt.ratio + seconds["total"]


def newest(store: Store) -> tuple[int, str, dict[str, float]]:
    info: Info = store.log()[0]
    tags: tuple[str, ...] = info.tags
    return info.step, ", ".join(tags), info.metrics


def restore_best(store: Store) -> object:
    try:
        return store.restore("best:loss", only="model.*")
    except ConflictError as error:
        return f"{error.code}: {error}"
    except CkstoreError as error:
        return error.exit_code


def attach(accelerator: object, trainer: object) -> None:
    ckstore.accelerate.attach(accelerator, "checkpoints")
    ckstore.transformers.attach(trainer, "checkpoints")


def mistakes(info: Info) -> None:
    info.no_such_field  # type: ignore[attr-defined]
    ckstore.no_such_name  # type: ignore[attr-defined]
    Policy(compression="extreme")  # type: ignore[arg-type]
"""
"""mypy reports the mistakes at its end too: an `ignore` that hides nothing is an error, so types are not just Any."""


def test_metadata_names_licence_authors_and_what_it_is_for():
    facts = metadata.metadata("ckstore")
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts.get_all("License-File") == ["LICENSE"]
    assert facts["Author"] == "The ckstore maintainers"
    assert "checkpoint" in facts["Keywords"].split(",")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(facts.get_all("Classifier"))
    assert facts["Version"] == ckstore.__version__


def installed_without_dependencies(folder):
    """Make an environment whose site-packages hold ckstore and nothing else, so that mypy reads no torch."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "ckstore").symlink_to(PACKAGE)
    return folder / "bin" / "python"


def test_users_script_passes_mypy_strict(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(USER_SCRIPT)
    python = installed_without_dependencies(tmp_path / "environment")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--config-file=", script]
    # Outside the checkout, so that mypy finds the package as installed, which needs py.typed.
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_native_module_needs_no_newer_glibc_than_wheels_promise():
    native = pytest.importorskip("ckstore._native")
    needed = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)", read(native.__file__))}
    promised = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)", wheels.MANYLINUX).groups()))
    assert needed
    assert max(needed) <= promised


def build_without_compiler(folder, **variables):
    """Build a wheel where the compiler fails; return the process and the names of what was built."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "wheels"]
    build_folder = f"--config-settings=build-dir={folder / 'build'}"
    env = {
        **os.environ,
        "CXX": "/bin/false",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **variables,
    }
    done = subprocess.run(
        [*command, build_folder, ROOT], capture_output=True, text=True, env=env, timeout=300, check=False
    )
    return done, [wheel.name for wheel in folder.glob("wheels/*.whl")]


def test_without_compiler_the_package_is_pure_python(tmp_path):
    done, built = build_without_compiler(tmp_path)
    assert done.returncode == 0, done.stderr
    assert built == [f"ckstore-{ckstore.__version__}-py3-none-any.whl"]


def test_required_native_module_makes_a_failing_compiler_an_error(tmp_path):
    done, built = build_without_compiler(tmp_path, CKSTORE_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert built == []


def read(path):
    return Path(path).read_bytes()


def test_wheel_without_native_module_is_refused():
    wheels.require_native(Path(f"ckstore-0.1.0-cp312-abi3-linux_{wheels.MACHINE}.whl"))
    with pytest.raises(wheels.WheelError, match="pure Python"):
        wheels.require_native(Path("ckstore-0.1.0-py3-none-any.whl"))
