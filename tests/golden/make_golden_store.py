"""Make the golden store of the current format.

    python tests/golden/make_golden_store.py

Run it by hand, once for each format version, never from a test. Everything random or time-dependent is fixed, so that
every run gives the same bytes. The store is a tar file, because git does not store empty folders. An existing file is
never replaced.
"""

from __future__ import annotations

import io
import random
import sys
import tarfile
import tempfile
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import numpy as np

import ckstore
from ckstore.config import FirstMomentSettings, LowRank, SecondMomentSettings, TensorSettings, WeightSettings
from ckstore.format.records import FORMAT_VERSION

HERE = Path(__file__).parent


class FixedClock:
    """A clock that advances by one second per reading."""

    def __init__(self) -> None:
        self._seconds = 1_790_000_000

    def now_ns(self) -> int:
        self._seconds += 1
        return self._seconds * 1_000_000_000

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing waits here")


def golden_state(step: int) -> dict[str, object]:
    """Return the state that was committed at a step; it must never change."""
    noise = np.random.Generator(np.random.PCG64(7))
    weights = (noise.integers(-(2**20), 2**20, 24_000).astype(np.float64) / 2**24).astype(np.float32)
    weights[:3] = [np.nan, -0.0, np.inf]
    halves = (weights.view(np.uint32) >> 16).astype(np.uint16)
    table = np.arange(9_000, dtype=np.int64).reshape(90, 100)
    return {
        "model": OrderedDict(
            {"w": weights[:20_000].reshape(100, 200), "b": weights[20_000:], "bf16 bits": halves, "mask": halves > 3}
        ),
        "moments": {0: {"m": weights * np.float32(step + 1), "step": step}, 1: {}},
        "table": table,
        "column": table[:, 3],
        "backwards": table[::-1],
        "zeros": np.zeros(30_000, np.float64),
        "scalar": np.float16(1.5),
        "0-d": np.array(7, np.int8),
        "empty": np.empty((0, 3), np.float32),
        "plain": [None, True, 2**100, -1.5, float("nan"), 1 + 2j, "ü", b"\x00\xff", (1, (2,)), {}],
    }


def moving_state(step: int) -> dict[str, object]:
    """Return a state that is stored with a delta, a chain of deltas, and a rounding; it must never change."""
    noise = np.random.Generator(np.random.PCG64(11))
    weights = noise.integers(-(2**20), 2**20, 80_000).astype(np.int32)
    weights = (weights + 3 * step).astype(np.float64) / 2**26
    master = weights.astype(np.float32)
    return {"half": master.astype(np.float16), "master": master, "counts": np.arange(40_000, dtype=np.int64) + step}


def lossy_state(step: int) -> dict[str, object]:
    """Return a state whose weights and both moments are quantized; it must never change."""
    noise = np.random.Generator(np.random.PCG64(13))
    start = noise.integers(-(2**20), 2**20, (100, 160)).astype(np.float64) / 2**24
    moves = [noise.integers(-(2**10), 2**10, (100, 160)).astype(np.float64) / 2**24 for _ in range(step)]
    second = (noise.integers(1, 2**20, (100, 160)).astype(np.float64) / 2**50).astype(np.float32)
    first = (noise.integers(-(2**8), 2**8, (100, 160)) / 2**9).astype(np.float32) * np.sqrt(second)
    weights = (start + sum(moves)).astype(np.float32)
    entry = {"step": np.array(step + 1.0, np.float32), "exp_avg": first, "exp_avg_sq": second}
    groups = [{"betas": (0.9, 0.999), "params": [0]}]
    return {
        "model": {"w": weights, "bias": weights[0].copy(), "half": weights.astype(np.float16)},
        "optimizer": {"state": {0: entry}, "param_groups": groups},
    }


def lossy_policies() -> list[ckstore.Residual]:
    """Return a lossy policy for each form of frame, independent of the current named policies.

    The store of version 3 has a sixth checkpoint, of codebooks, which ckstore no longer writes.
    """
    grid = TensorSettings(WeightSettings(), FirstMomentSettings(), SecondMomentSettings("log"))
    ternary = TensorSettings(WeightSettings(step=2.0), FirstMomentSettings("ternary"), SecondMomentSettings("rank1"))
    few = LowRank(error_max=1.0)
    outer = TensorSettings(
        WeightSettings(low_rank=few), FirstMomentSettings(low_rank=few), SecondMomentSettings(low_rank=few)
    )
    dropped = TensorSettings(WeightSettings(), FirstMomentSettings("dropped"), SecondMomentSettings())
    return [ckstore.Residual("golden", tensors) for tensors in (grid, grid, ternary, outer, dropped)]


def make_store(folder: Path) -> None:
    """Commit with every kind of compression, and use every operation that leaves files."""
    with ckstore.open(folder, run="main", clock=FixedClock(), engine="pwrite") as store:
        for step, compression in enumerate(("none", "fast", "best")):
            policy = ckstore.Policy(compression=compression, threads=1)  # type: ignore[arg-type]
            store.commit(golden_state(step), step, metrics={"loss": 2.0 - step / 4}, policy=policy)
        store.tag(1, "kept")
        store.commit(golden_state(3), 3)
        store.rewind(1)
        store.delete(3)
    with ckstore.open(folder, run="other", clock=FixedClock(), engine="pwrite") as store:
        store.commit(golden_state(0), 0)
    with ckstore.open(folder, run="moving", clock=FixedClock(), engine="pwrite") as store:
        for step in range(3):
            receipt = store.commit(moving_state(step), step, policy=ckstore.Policy(read_amplification_max=9, threads=1))
            assert receipt.chunks_derived == 1, "the golden store must hold a rounding"
            assert receipt.chunks_delta == 2 * (step > 0), "the golden store must hold differences"
    with ckstore.open(folder, run="lossy", clock=FixedClock(), engine="pwrite") as store:
        for step, fidelity in enumerate(lossy_policies()):
            receipt = store.commit(lossy_state(step), step, policy=ckstore.Policy(fidelity=fidelity, threads=1))
            assert step == 0 or receipt.lossy_count >= 4, "the golden store must hold codes"


def main() -> int:
    """Write the tar file, unless it exists."""
    target = HERE / f"v{FORMAT_VERSION}" / "store.tar"
    if target.exists():
        print(f"{target} exists and stays")
        return 1
    seeded = random.Random(20_260)
    with tempfile.TemporaryDirectory() as scratch, mock.patch("os.urandom", seeded.randbytes):
        folder = Path(scratch) / "store"
        make_store(folder)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for path in [folder, *sorted(folder.rglob("*"))]:
                member = tar.gettarinfo(path, arcname=str(Path("store") / path.relative_to(folder)))
                member.uid = member.gid = member.mtime = 0
                member.uname = member.gname = ""
                with path.open("rb") if path.is_file() else io.BytesIO() as content:
                    tar.addfile(member, content if path.is_file() else None)
    target.write_bytes(packed.getvalue())
    print(f"{target}: {len(packed.getvalue())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
