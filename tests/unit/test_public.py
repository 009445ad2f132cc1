"""Protects the public interface: exported names, and what importing, committing and listing load.

``import ckstore`` must be fast, a state of arrays must not need torch, and nothing may load pickle.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore
from ckstore.hashing import chunk_id_of
from support.synthetic_training import AdamRun, W, leaf, losses, lossy_policy

SRC = str(Path(ckstore.__file__).parent.parent)

NAMES = [
    "Advice",
    "AutoInterval",
    "BackendError",
    "BoundError",
    "CapacityError",
    "ChecksumError",
    "CkstoreError",
    "ConflictError",
    "CorruptError",
    "DemotePolicy",
    "FirstMomentSettings",
    "Info",
    "LeafTypeError",
    "LockHeldError",
    "LowRank",
    "MalformedError",
    "MissingChunkError",
    "NotFoundError",
    "Pending",
    "PerRank",
    "PerRankValues",
    "Policy",
    "RankError",
    "Ranks",
    "Receipt",
    "RepackPolicy",
    "Replicated",
    "Residual",
    "Retention",
    "SaverError",
    "SecondMomentSettings",
    "StandIn",
    "Store",
    "TensorSettings",
    "TrainState",
    "UnreachableError",
    "UnsupportedError",
    "UsageError",
    "WeightSettings",
    "clip_grad_norm_",
    "open",
    "register_converter",
    "repair_store",
]
"""Public names, fixed by the design. Names are added deliberately and never removed."""

VERBS = {
    "commit": ["state", "step", "metrics", "tags", "policy"],
    "commit_async": ["state", "step", "metrics", "tags", "policy"],
    "prewarm": ["state", "policy"],
    "attach": ["optimizer"],
    "guard": ["optimizer"],
    "wait": [],
    "commit_on_signal": ["get_state", "signals", "deadline_seconds", "then", "metrics", "tags", "policy"],
    "advise": ["step_seconds", "overhead", "failures_per_day"],
    "restore": [
        "ref",
        "into",
        "only",
        "device",
        "exact",
        "fallback",
        "on_progress",
        "replay",
        "replay_check",
        "after_step",
    ],
    "journal": ["optimizers", "keyframe_every", "replay_seconds", "replayed"],
    "export_hf": ["ref", "folder", "only", "strip_prefix", "dtype", "max_shard_nbytes", "force", "on_progress"],
    "export_safetensors": ["ref", "file", "only", "strip_prefix", "force", "on_progress"],
    "latest": [],
    "log": [],
    "steps": [],
    "info": ["ref"],
    "tag": ["ref", "name"],
    "untag": ["name"],
    "rewind": ["ref"],
    "delete": ["ref"],
    "verify": ["level", "ref", "remote", "replay", "on_progress"],
    "coding": ["ref"],
    "stats": ["ref", "exact", "on_progress"],
    "diff": ["first", "second", "only", "on_progress"],
    "repack": ["policy", "dry_run", "on_progress"],
    "demote": ["refs", "policy", "replay", "dry_run", "on_progress"],
    "gc": [
        "policy",
        "all_runs",
        "dry_run",
        "now",
        "max_delete",
        "min_age",
        "trash_for",
        "repack_nbytes_max",
        "waste_max",
        "clear_intents",
        "on_progress",
    ],
    "trash": [],
    "restore_from_trash": ["trash_id"],
    "purge": ["trash_id"],
    "accept_missing": [],
    "undelete": ["ref"],
    "set_retention": ["policy"],
    "set_trash_for": ["span"],
    "tiers": [],
    "push": ["address", "keep_local", "older_than", "tier", "read_back", "dry_run", "on_progress"],
    "pull": ["refs", "dry_run", "on_progress"],
    "adopt": ["is_original"],
    "mirror": ["address", "read_back", "dry_run", "on_progress"],
    "import_from": ["source", "step", "numbered", "exclude", "skip_leaf", "policy", "dry_run", "on_progress"],
    "quarantine": ["dry_run"],
    "repair": ["dry_run", "sources", "on_progress"],
    "usage": [],
    "report": ["on_progress"],
    "close": [],
}

BLOCK_TORCH = """
import importlib.machinery, sys
class Blocker(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Blocker
"""


def run_python(code, *arguments):
    """Run code in a new interpreter, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {SRC!r})\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exported_names():
    assert ckstore.__all__ == NAMES
    assert sorted(ckstore.__all__, key=str) == ckstore.__all__


def test_namespace_shows_public_names_and_nothing_else(tmp_path):
    code = """
import ckstore
with ckstore.open(sys.argv[1]) as store:
    store.commit({"a": 1}, 5)
shown = {name for name in dir(ckstore) if not name.startswith("__")}
print(sorted(shown ^ set(ckstore.__all__)))
print([name for name in ("importlib", "annotations", "Any", "TYPE_CHECKING") if hasattr(ckstore, name)])
[getattr(ckstore, name) for name in dir(ckstore)]
print("torch" in sys.modules)
import ckstore.lightning
print(sorted(set(dir(ckstore)) - set(ckstore.__all__) - {name for name in dir(ckstore) if name.startswith("__")}))
"""
    assert run_python(code, tmp_path / "store").splitlines() == ["[]", "[]", "False", "['lightning']"]


def test_door_of_a_missing_framework_is_missing(tmp_path):
    (tmp_path / "accelerate.py").write_text("raise ModuleNotFoundError('not here', name='accelerate')")
    code = """
sys.path.insert(0, sys.argv[1])
import ckstore
print(hasattr(ckstore, "accelerate"))
try:
    ckstore.accelerate
except AttributeError as error:
    print(error)
"""
    words = "ckstore.accelerate needs a package that is not installed: accelerate"
    assert run_python(code, tmp_path).splitlines() == ["False", words]


def test_exported_names_resolve_and_are_documented():
    for name in ckstore.__all__:
        assert inspect.getdoc(getattr(ckstore, name)), name


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'snapshot'"):
        ckstore.snapshot  # noqa: B018


def test_arguments_of_verbs():
    for verb, arguments in VERBS.items():
        found = list(inspect.signature(getattr(ckstore.Store, verb)).parameters)
        assert found == ["self", *arguments], verb


def test_receipt_has_the_promised_facts():
    promised = {
        "step", "seq", "checkpoint_id", "bytes_state", "bytes_written", "chunks_new", "chunks_reused",
        "chunks_delta", "chunks_derived", "seconds", "engine", "warnings",
    }  # fmt: skip
    assert promised <= set(inspect.signature(ckstore.Receipt).parameters)


def test_import_loads_neither_numpy_nor_torch():
    heavy = {"numpy", "torch", "rich", "typer", "msgspec"}
    loaded = run_python(f"import ckstore; print(sorted({heavy} & {{*sys.modules}}))")
    assert loaded == "[]"


def test_ls_loads_neither_numpy_nor_torch(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"a": 1}, 5)
    code = """
import contextlib, io, json
from ckstore.cli.main import main
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main(["ls", sys.argv[1], "--json"])
print('"step": 5' in shown.getvalue() or '"step":5' in shown.getvalue(), sorted({'numpy', 'torch'} & {*sys.modules}))
"""
    assert run_python(code, tmp_path / "store") == "True []"


def test_reading_the_history_does_not_load_torch(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"a": 1}, 5)
    code = """
import ckstore
with ckstore.open(sys.argv[1], create=False) as store:
    print([info.step for info in store.log()], store.latest().step, store.steps(), "torch" in sys.modules)
"""
    assert run_python(code, tmp_path / "store") == "[5] 5 [5] False"


def test_arrays_work_without_torch_installed(tmp_path):
    code = f"""
{BLOCK_TORCH}
import numpy, ckstore
state = {{"w": numpy.arange(9.0)[::2], "scalar": numpy.float32(1.5), "text": "x", "tree": [(1, None)]}}
with ckstore.open(sys.argv[1]) as store:
    store.commit(state, 3)
    back = store.restore()
    print(back["w"].tobytes() == state["w"].tobytes(), type(back["scalar"]).__name__, back["tree"])
    print(store.verify("decode").is_clean, "torch" in sys.modules)
"""
    assert run_python(code, tmp_path / "store").splitlines() == ["True float32 [(1, None)]", "True False"]


def test_arrays_do_not_load_installed_torch(tmp_path):
    code = """
import numpy, ckstore
with ckstore.open(sys.argv[1]) as store:
    store.commit({"w": numpy.arange(9.0)}, 3)
    store.restore()
    print("torch" in sys.modules)
"""
    assert run_python(code, tmp_path / "store") == "False"


QUANT = "print([name for name in sys.modules if name.startswith('ckstore.quant')])"


def test_exact_commit_and_restore_load_no_quantization(tmp_path):
    code = f"""
import numpy, ckstore
with ckstore.open(sys.argv[1]) as store:
    for step in range(3):
        store.commit({{"w": numpy.arange(1 << 18, dtype="f4") + step, "small": numpy.ones(3)}}, step)
    store.restore()
import ckstore.background.saver.server
{QUANT}
"""
    assert run_python(code, tmp_path / "store") == "[]"


def test_fresh_process_restores_quantized_weights(tmp_path):
    """The decoder is imported by name with the first quantized chunk, and nowhere else."""
    with ckstore.open(tmp_path / "store", policy=lossy_policy()) as store:
        run = AdamRun()
        for step in range(2):
            store.commit(run.train().state(), step)
        recorded, expected = losses(store), leaf(store.restore(), W)
    assert W in recorded
    code = f"""
import ckstore
from ckstore.hashing import chunk_id_of
with ckstore.open(sys.argv[1]) as store:
    store.log()
    {QUANT}
    print(chunk_id_of(store.restore()["model"]["w"].tobytes()).hex())
    print("ckstore.quant.chunk_codec" in sys.modules, "ckstore.quant.planning" in sys.modules)
"""
    shown = run_python(code, tmp_path / "store").splitlines()
    assert shown == ["[]", chunk_id_of(expected.tobytes()).hex(), "True False"]


def test_tensors_without_torch_have_install_advice(tmp_path):
    torch = pytest.importorskip("torch")
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"w": torch.arange(4.0), "n": 7}, 3)
    code = f"""
{BLOCK_TORCH}
import ckstore
with ckstore.open(sys.argv[1]) as store:
    try:
        store.restore()
    except ckstore.UnsupportedError as error:
        print(error)
    print(store.restore(only="n"), store.verify("decode").is_clean, store.steps())
"""
    message, rest = run_python(code, tmp_path / "store").splitlines()
    assert "install torch" in message.lower()
    assert rest == "{'n': 7} True [3]"


def test_nothing_loads_pickle_on_its_own(tmp_path):
    code = """
import ckstore
with ckstore.open(sys.argv[1]) as store:
    store.commit({"a": 1, "b": b"x"}, 3)
    store.restore()
users = [name for name, module in sys.modules.items()
         if name.split(".")[0] == "ckstore" and hasattr(module, "pickle")]
print(users)
"""
    assert run_python(code, tmp_path / "store") == "[]"
