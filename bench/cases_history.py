"""The cases history_* and stored_real: the size on disk of whole checkpoints of the trained run.

Sizes are measured with the checkpoints as they are. Speeds of durable commits and cold restores are measured with a
larger state, which combines ten checkpoints; its successor combines the ten that are 25 steps later. So all encoded
bytes come from the run, and no chunk occurs twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import coders, device, histories, machine, peer_file_sizes
from bench.measure import Participant, Result, Sample, interleave, log
from bench.training import Arrays
from bench.workbench import Bench, facts_of, gigabytes_per_second, open_store, with_ckstore

OURS: dict[str, dict[str, Any]] = {
    "ckstore": {},
    "ckstore, chains of any length": {"read_amplification_max": 1000.0},
    "ckstore, no deltas": {"delta": False},
}
LoadArrays = Callable[[], Arrays]


def _history(name: str, loaders: Sequence[LoadArrays], bench: Bench) -> Result:
    """Store successive checkpoints with every tool, and compare the sizes."""
    result = Result(name, "stored bytes / state bytes", is_higher_better=False, columns=("first", "later", "bounded"))
    result.setting = {"checkpoints": len(loaders)}
    keyframes: set[int] = set()
    if bench.has_ckstore is None:
        for label, options in OURS.items():
            try:
                sample = _by_ckstore(bench.folder / "store", loaders, options)
            except Exception as error:
                # Continue, because the sizes of the other tools are still useful; run.py reports the failure.
                result.unusable[label] = f"{type(error).__name__}: {error}"
                machine.remove_tree(bench.folder / "store")
                continue
            result.samples[label] = [sample]
            log(f"  {label}: {sample.value:.4f}")
            keyframes = keyframes or set(sample.facts["keyframes"])  # type: ignore[call-overload]
    else:
        result.unusable["ckstore"] = bench.has_ckstore
    peers = peer_file_sizes.measure(loaders, keyframes, bench.tools)
    result.unusable |= peers.unusable
    result.setting |= {"state_nbytes": peers.plain[-1], "keyframes": sorted(keyframes)}
    for label, sizes in peers.best.items():
        bounded = sum(peers.bounded[label]) / sum(peers.plain)
        result.samples[label] = [_sample(peers.plain, sizes, bounded=bounded)]
    result.add_ratios(list(OURS), [label for label in result.samples if label not in OURS])
    result.notes.append("first: the first checkpoint; later: the mean of the others")
    result.notes.append("bounded: the total when a tool, too, makes a keyframe wherever ckstore makes one")
    return result


def _sample(plain: Sequence[int], stored: Sequence[int], **facts: object) -> Sample:
    later = sum(stored[1:]) / max(1, sum(plain[1:]))
    sizes = {"first": stored[0] / plain[0], "later": later, "stored_nbytes": sum(stored), "sizes": list(stored)}
    return Sample(sum(stored) / sum(plain), {**sizes, **facts})


def _by_ckstore(place: Path, loaders: Sequence[LoadArrays], options: dict[str, Any]) -> Sample:
    """Commit every checkpoint; count all files of the store; restore some of them and compare."""
    plain: list[int] = []
    stored: list[int] = []
    receipts: list[Any] = []
    before = 0
    with open_store(place, **options) as store:
        for step, load in enumerate(loaders):
            state = histories.state_of(load(), step)
            receipts.append(store.commit(state, step))
            after = machine.tree_nbytes(place)
            plain.append(histories.nbytes_of(state))
            stored.append(after - before)
            before = after
        for step in {0, len(loaders) // 2, len(loaders) - 1}:
            if not histories.is_same(histories.state_of(loaders[step](), step), store.restore(step)):
                raise AssertionError(f"checkpoint {step} is not what was committed")
    machine.remove_tree(place)
    # This commit wrote chunks but no delta: it counts as a keyframe.
    keyframes = [step for step, receipt in enumerate(receipts) if not receipt.chunks_delta]
    return _sample(plain, stored, keyframes=keyframes, commits=[facts_of(receipt) for receipt in receipts])


def _loaders(bench: Bench, kind: str) -> list[LoadArrays]:
    """Return a function for each checkpoint of a history that loads it."""
    trained = bench.training
    if kind == "rl":
        return [partial(_item, trained.rl, index) for index in range(len(trained.rl()))]
    if kind == "lora":
        return [partial(_item, trained.lora, index) for index in range(len(trained.lora()))]
    make = histories.mixed if kind == "bf16" else None
    return [partial(_step, trained, step, make) for step in trained.plan.history]


def _item(load_all: Callable[[], list[Arrays]], index: int) -> Arrays:
    return load_all()[index]


def _step(trained: Any, step: int, make: Callable[[Arrays], Arrays] | None) -> Arrays:
    arrays = trained.step(step)
    return arrays if make is None else make(arrays)


def history(kind: str, bench: Bench) -> Result:
    """Store a history of one kind."""
    return _history(f"history_{kind}", _loaders(bench, kind), bench)


def _side_by_side(bench: Bench, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two large states: every other checkpoint combined, and the successor of each one combined."""
    loaders = _loaders(bench, kind)
    count = min(len(loaders) // 2, max(1, bench.nbytes // histories.nbytes_of(histories.state_of(loaders[0](), 0))))
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number in range(2 * count):
        states[number % 2][f"replica {number // 2}"] = histories.state_of(loaders[number](), number)
    return states


def history_commit(kind: str, bench: Bench) -> Result:
    """Commit a large state, then its successor, each until durable; compare with plain writes to the device."""
    older, newer = _side_by_side(bench, kind)
    nbytes, folder, buffers = histories.nbytes_of(older), bench.folder, device.Buffers()
    result = Result(f"history_commit_{kind}", "GB/s", is_higher_better=True, columns=("stored",))
    result.setting = {"state_nbytes": nbytes, "gap": bench.training.plan.gap, "rounds": bench.rounds}
    machine.check_space(folder, int(2.5 * nbytes))

    def on_device() -> Sample:
        ways = device.best_write(folder, nbytes, buffers)
        speeds = {name: gigabytes_per_second(nbytes, seconds) for name, seconds in ways.items()}
        return Sample(max(speeds.values()), {"ways": speeds})

    def committing(is_delta: bool) -> Sample:
        place = folder / "store"
        with open_store(place) as store:
            if is_delta:
                store.commit(older, 1)
                machine.make_cold(place)
            began = time.perf_counter()
            receipt = store.commit(newer if is_delta else older, 2)
            seconds = time.perf_counter() - began
        machine.remove_tree(place)
        facts = {"seconds": seconds, "stored": receipt.bytes_written / nbytes, **facts_of(receipt)}
        return Sample(gigabytes_per_second(nbytes, seconds), facts)

    mine: dict[str, Participant] = {
        "ckstore keyframe": partial(committing, False),
        "ckstore delta": partial(committing, True),
    }
    result.notes.append("before a delta the caches are dropped: its base is read from the device")
    return with_ckstore(bench, result, {"device": on_device}, mine)


def history_restore(kind: str, bench: Bench) -> Result:
    """Restore a keyframe and a delta checkpoint with cold caches; compare with plain reads from the device."""
    older, newer = _side_by_side(bench, kind)
    nbytes, folder, buffers = histories.nbytes_of(older), bench.folder, device.Buffers()
    result = Result(f"history_restore_{kind}", "GB/s", is_higher_better=True)
    result.setting = {"state_nbytes": nbytes, "gap": bench.training.plan.gap, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    machine.check_space(folder, int(3.5 * nbytes))
    raw, place, into = folder / "device.bin", folder / "store", histories.blank_like(older)
    device.write_durably(raw, nbytes, device.by_threads(buffers, 8))
    with open_store(place) as store:
        receipts = [store.commit(state, step) for step, state in ((1, older), (2, newer))]
    result.setting["chunks_delta"] = receipts[1].chunks_delta
    result.setting["stored"] = [round(receipt.bytes_written / nbytes, 4) for receipt in receipts]

    def on_device() -> Sample:
        machine.make_cold(folder)
        ways = device.best_read(raw, nbytes, buffers)
        return Sample(max(gigabytes_per_second(nbytes, seconds) for seconds in ways.values()))

    def restoring(step: int, is_in_place: bool) -> Sample:
        histories.clear(into)
        machine.make_cold(place)
        began = time.perf_counter()
        with open_store(place) as store:
            loaded = store.restore(step, into=into) if is_in_place else store.restore(step)
            seconds = time.perf_counter() - began
        if not histories.is_same((older, newer)[step - 1], loaded):
            raise AssertionError("what was restored is not what was committed")
        return Sample(gigabytes_per_second(nbytes, seconds), {"seconds": seconds})

    participants: dict[str, Participant] = {"device": on_device}
    for label, step in (("ckstore keyframe", 1), ("ckstore delta", 2)):
        participants[label] = partial(restoring, step, False)
        participants[f"{label}, into="] = partial(restoring, step, True)
    interleave(result, participants, bench.rounds)
    result.add_ratios([name for name in participants if name != "device"], ["device"])
    result.add_ratios(["ckstore delta"], ["ckstore keyframe"])
    result.add_ratios(["ckstore delta, into="], ["ckstore keyframe, into="])
    machine.remove_tree(place)
    raw.unlink()
    return result


def stored_real(bench: Bench) -> Result:
    """Store checkpoints of the trained run without a base; compare with ideal order-0 coding of byte planes."""
    import zstandard

    result = Result("stored_real", "stored bytes / state bytes", is_higher_better=False, columns=("over_bound",))
    loaders = _loaders(bench, "fp32")[:: max(1, bench.training.plan.count // bench.rounds)][: bench.rounds]
    result.setting = {"run": bench.training.plan.name, "commits": len(loaders)}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
    for step, load in enumerate(loaders):
        arrays = load()
        state, nbytes = histories.state_of(arrays, step), sum(values.nbytes for values in arrays.values())
        bound = sum(piece.bound for piece in coders.pieces_of(arrays)) / nbytes
        coder = zstandard.ZstdCompressor(level=3)
        shares = {
            "order-0 entropy of byte planes": bound,
            "zstd -3": sum(len(coder.compress(values.data)) for values in arrays.values()) / nbytes,
        }
        for compression in ("none", "fast", "best") if bench.has_ckstore is None else ():
            # A new store for each commit: nothing to reuse, and no base.
            with open_store(bench.folder / "real", compression, delta=False) as store:
                shares[f"ckstore {compression}"] = store.commit(state, step).bytes_written / nbytes
            machine.remove_tree(bench.folder / "real")
        for name, share in shares.items():
            result.samples.setdefault(name, []).append(Sample(share, {"over_bound": share / bound - 1}))
    return result


def _cases() -> dict[str, Callable[[Bench], Result]]:
    lines = {
        "fp32": "Store a history of fp32 checkpoints, 25 steps apart.",
        "bf16": "Store a history of bf16 checkpoints with fp32 masters, 25 steps apart.",
        "rl": "Store successive bf16 weights of which one in a hundred changes.",
        "lora": "Store successive adapters of a frozen base.",
    }
    found: dict[str, Callable[[Bench], Result]] = {"stored_real": stored_real}
    for kind, line in lines.items():
        found[f"history_{kind}"] = partial(history, kind)
        found[f"history_{kind}"].__doc__ = line
    for make in (history_commit, history_restore):
        for kind in ("fp32", "bf16"):
            case = partial(make, kind)
            case.__doc__ = make.__doc__
            found[f"{make.__name__}_{kind}"] = case
    return found


CASES = _cases()
