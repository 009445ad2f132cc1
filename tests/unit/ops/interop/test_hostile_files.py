"""Protects against hostile files: they run no code, take bounded memory, and can crash only the child process."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CapacityError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.ops.interop import child as loader_module
from ckstore.ops.interop.child import Answer, Loader, read_state
from ckstore.ops.interop.foreign_state import OpenFile
from ckstore.ops.interop.safetensors import read_header
from ckstore.ops.interop.unpickle import Record, StandIns, Symbol, read_inert
from ckstore.processes import JOB_SIGNALS
from support import foreign_checkpoints


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_torch_file_is_refused_and_not_run(store, tmp_path):
    torch.save({"model": Evil(tmp_path / "owned")}, tmp_path / "step_1.pt")
    with pytest.raises(UnsupportedError, match=r"posix\.mkdir.*only code can create"):
        store.import_from(tmp_path / "step_1.pt")
    assert not (tmp_path / "owned").exists()
    assert store.log() == []


def test_code_in_dcp_metadata_is_refused_and_not_run(store, tmp_path):
    foreign_checkpoints.write_dcp(tmp_path / "dcp", steps=(1,))
    (tmp_path / "dcp" / "step-1" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(CorruptError, match=r"was not written by torch\.distributed\.checkpoint"):
        store.import_from(tmp_path / "dcp" / "step-1")
    assert not (tmp_path / "owned").exists()


def test_flipped_bytes_of_dcp_metadata_are_harmless(tmp_path):
    from ckstore.ops.interop.torch_files import load_dcp

    states = foreign_checkpoints.write_dcp(tmp_path / "dcp", steps=(1,))
    folder = tmp_path / "dcp" / "step-1"
    whole = (folder / ".metadata").read_bytes()
    seed = np.random.default_rng(5)
    wrong = 0
    for offset in seed.choice(len(whole), 150, replace=False):
        changed = bytearray(whole)
        changed[offset] ^= 1 << int(seed.integers(8))
        (folder / ".metadata").write_bytes(changed)
        try:
            state = load_dcp(str(folder), StandIns())
        except CkstoreError:
            continue
        # A flipped letter in a name gives another name. Its tensor must still have the right bytes.
        for key, tensor in (state.get("model") or {}).items():
            found = states[1]["model"].get(key)
            wrong += found is not None and not torch.equal(found, tensor)
    assert wrong == 0


def test_truncated_torch_file_is_corrupt(store, tmp_path):
    foreign_checkpoints.write_nanogpt(tmp_path / "out", steps=(1,))
    file = tmp_path / "out" / "ckpt_1.pt"
    whole = file.read_bytes()
    for nbytes in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:nbytes])
        with pytest.raises(CorruptError):
            store.import_from(file)
    assert store.log() == []


def test_file_that_claims_too_much_is_refused(store, tmp_path):
    # A compressed archive: a thousand bytes become a million, and could become a million million.
    torch.save({"w": torch.zeros(16_000_000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "step_1.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CkstoreError) as raised:
        store.import_from(tmp_path / "step_1.pt")
    assert isinstance(raised.value, (CapacityError, CorruptError))
    assert store.log() == []


def test_memory_bomb_ends_only_the_child(tmp_path, monkeypatch):
    monkeypatch.setattr("ckstore.ops.interop.child.BASE_NBYTES", 0)
    file = tmp_path / "step_1.pt"
    torch.save({"w": torch.zeros(10)}, file)
    code = (
        "import resource, sys; from ckstore.ops.interop import child; child.BASE_NBYTES = 200 << 20; "
        "from ckstore.ops.interop import torch_files; "
        "torch_files.load_file = lambda *_, values_only=False: {'w': [bytearray(1 << 20) for _ in range(10_000)]}; "
        "child.serve(int(sys.argv[1]))"
    )
    with Loader() as loader:
        _with_child(monkeypatch, code)
        with pytest.raises(CapacityError, match="takes more memory"):
            loader.load("torch", file, file.stat().st_size)


def _with_child(monkeypatch, code):
    """Make the loader start this code instead of its child."""
    start = subprocess.Popen
    monkeypatch.setattr(
        loader_module.subprocess,
        "Popen",
        lambda command, **options: start([sys.executable, "-c", code, *command[3:]], **options),
    )


def test_crashed_or_hanging_child_is_an_error(tmp_path, monkeypatch):
    with Loader() as loader:
        for code, words, timeout_seconds in (
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV", 200.0),
            ("import os; os._exit(3)", "ended with code 3", 200.0),
            ("import os, time; time.sleep(600)", "did not answer for", 0.3),
        ):
            loader.timeout_seconds = timeout_seconds
            with monkeypatch.context() as patched:
                _with_child(patched, code)
                with pytest.raises(CorruptError, match=words):
                    loader.load("torch", tmp_path / "x.pt", 100)
            assert loader.child_pid is None
        loader.timeout_seconds = 200.0
        torch.save({"w": torch.ones(3)}, tmp_path / "y.pt")
        loader.load("torch", tmp_path / "y.pt", 2000)
        # A scheduler sends these signals to every process of a job.
        for number in JOB_SIGNALS:
            os.kill(loader.child_pid, number)
        captured = loader.load("torch", tmp_path / "y.pt", 2000).captured
        assert bytes(captured.storages[0].read(0, 12)) == struct.pack("<3f", 1, 1, 1)
        child = loader.child_pid
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_file_that_shrinks_while_read_is_an_error(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    file = OpenFile(os.open(path, os.O_RDONLY), str(path))
    os.truncate(path, 50)
    with pytest.raises(CorruptError, match="ends early"):
        file.read(0, 100)


@pytest.mark.parametrize("place", [(0, 10), (1 << 40, 10), (0, 1 << 40)])
def test_answer_outside_the_memory_file_is_refused(tmp_path, place):
    path = tmp_path / "x"
    path.write_bytes(b"\x00" * 64)
    with pytest.raises(MalformedError):
        read_state(OpenFile(os.open(path, os.O_RDONLY), "x"), Answer(*place, None))


def test_pickle_parser_keeps_names_and_calls_nothing(tmp_path):
    found = read_inert(pickle.dumps({"a": [Evil(tmp_path / "x"), (1, 2.5, None, True)], "b": {3}}, protocol=4))
    assert isinstance(found["a"][0], Record)
    assert (found["a"][0].kind, found["a"][0].arguments) == (Symbol("posix", "mkdir"), (str(tmp_path / "x"),))
    assert found["a"][1] == (1, 2.5, None, True)
    assert found["b"] == {3}
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_parser_reads_every_protocol(protocol):
    plain = {"text": "é" * 300, "bytes": b"\x00\xff", "long": 1 << 200, "nested": [[], {}, (), ("x",) * 5], "f": -0.5}
    if protocol < 3:
        # Before protocol 3, bytes are stored as a codec call.
        del plain["bytes"]
    assert read_inert(pickle.dumps(plain, protocol=protocol)) == plain


UNSOUND = [b"", b".", b"\x80\x04.", b"N", b"\x80\x04]q\x05h\x09.", b"(.", b"(\x85.", b"\x85.", b"e.", b"K\x01b."]


@pytest.mark.parametrize("content", UNSOUND)
def test_unsound_pickles_are_refused(content):
    with pytest.raises(MalformedError):
        read_inert(content)


def test_pickle_with_persistent_ids_is_unsupported():
    with pytest.raises(UnsupportedError, match="PERSID"):
        read_inert(b"Pname\n.")


def safetensors(table, nbytes):
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


def entry(shape=(2,), offsets=(0, 8), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 1 << 60),
        safetensors(b"[]", 0),
        safetensors(b" {}", 0),
        safetensors(b'{"a": 1}', 0),
        safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', 8),
        safetensors({"a": entry()}, 7),
        safetensors({"a": entry()}, 9),
        safetensors({"a": entry(shape=(3,))}, 8),
        safetensors({"a": entry(shape=(-2,))}, 8),
        safetensors({"a": entry(shape=(2.0,))}, 8),
        safetensors({"a": entry(shape=(True, 2))}, 8),
        safetensors({"a": entry(offsets=(8, 0))}, 8),
        safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
        safetensors({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
        safetensors({"a": entry(shape=(1 << 40, 1 << 40))}, 8),
        safetensors({"a": {"dtype": "F32", "shape": [2]}}, 8),
        safetensors({"a": entry(shape=(3,), offsets=(0, 1), dtype="F4")}, 1),
        safetensors({"__metadata__": {"ckstore.same_tensors": "{}}"}}, 0),
        safetensors({"a": entry(), "__metadata__": {"ckstore.same_tensors": '{"b": "c"}'}}, 8),
        safetensors({"__metadata__": {"a": 1}}, 0),
        safetensors(b'{"a":' * 10_000, 0),
        safetensors(b'{"\xff": 1}', 0),
    ],
)
def test_malformed_safetensors_are_refused(content):
    with pytest.raises(MalformedError):
        read_header(lambda offset, nbytes: content[offset : offset + nbytes], len(content), where="x")


def test_flipped_safetensors_header_reads_within_the_file(tmp_path):
    content = safetensors({"a": entry(), "bb": entry(offsets=(8, 16)), "__metadata__": {"format": "pt"}}, 16)
    begin = len(content) - 16
    for bit in range(8 * begin):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            held = bytes(changed)
            header = read_header(lambda offset, nbytes, held=held: held[offset : offset + nbytes], len(held))
        except CkstoreError:
            continue
        assert all(8 <= each.offset <= each.offset + each.nbytes <= len(content) for each in header.entries)


def test_safetensors_of_unknown_dtype_are_unsupported():
    content = safetensors({"a": entry(dtype="F6_E2M3")}, 8)
    with pytest.raises(UnsupportedError, match="F6_E2M3"):
        read_header(lambda offset, nbytes: content[offset : offset + nbytes], len(content))


def test_unsupported_leaf_names_its_file_and_path(store, tmp_path):
    torch.save({"model": {"w": torch.ones(2).to_sparse()}}, tmp_path / "step_1.pt")
    with pytest.raises(CkstoreError, match=r"step_1\.pt.*model\.w"):
        store.import_from(tmp_path / "step_1.pt")


def test_names_in_files_never_become_paths(store, tmp_path):
    torch.save({"../../escape": torch.ones(2), "a\x1b[31m": 1}, tmp_path / "step_1.pt")
    store.import_from(tmp_path / "step_1.pt")
    assert set(store.restore(1)) == {"../../escape", "a\x1b[31m"}
    assert not any("escape" in name for _, folders, files in os.walk(tmp_path) for name in (*folders, *files))


def test_dcp_part_outside_its_folder_is_refused(tmp_path):
    from ckstore.ops.interop.torch_files import load_dcp

    foreign_checkpoints.write_dcp(tmp_path / "dcp", steps=(1,))
    folder = tmp_path / "dcp" / "step-1"
    content = (folder / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in content
    (folder / ".metadata").write_bytes(content.replace(name, b"../x/y.distc"))
    with pytest.raises(CorruptError, match="is missing"):
        load_dcp(str(folder), StandIns())


def test_legacy_torch_file_is_read(store, tmp_path):
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(5)}, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "step_1.pt").write_bytes(buffer.getvalue())
    store.import_from(tmp_path / "step_1.pt")
    assert torch.equal(store.restore(1)["w"], torch.arange(5))


def test_import_without_torch_has_advice(store, tmp_path, monkeypatch):
    torch.save({"w": torch.arange(5)}, tmp_path / "step_1.pt")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(UnsupportedError, match=r"torch is not installed"):
        store.import_from(tmp_path / "step_1.pt")


def test_refused_imports_leave_the_store_clean(store, tmp_path):
    store.commit({"a": np.arange(4)}, 1)
    for name, content in {"step_2.pt": b"x" * 100, "step_3.safetensors": b"y" * 100}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CorruptError):
            store.import_from(tmp_path / name)
    assert store.verify("decode").is_clean
    assert isinstance(store, ckstore.Store)
