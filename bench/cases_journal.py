"""The cases journal_*: bits of each stored step, its cost to a trainer, and time and exactness of replays."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench import coders, entropy, machine, peers
from bench.journal_runs import JournaledRun, Kind, Seen, noted_gradients, settings_of
from bench.measure import Participant, Result, Sample, interleave, log
from bench.training import Arrays
from bench.workbench import Bench, open_store, with_ckstore
from ckstore._testing import repository_of
from ckstore.config import Limits
from ckstore.journal.blobs import BlobWriter, DecodeMemory
from ckstore.journal.checksums import checksums_of
from ckstore.journal.gradients import GradientMemory, SeenGradient, load_gradient, store_gradient
from ckstore.journal.history import read_point
from ckstore.state.capture import capture, loaded_adapters
from ckstore.store.points import find_point

ROWS: dict[str, Kind] = {
    "bf16": Kind(),
    "bf16, beta2 .999": Kind(beta2=0.999),
    "bf16, clipped": Kind(clip=0.5),
    "bf16, 4 micro-batches in fp32": Kind(micro_count=4),
    "fp32": Kind(is_bf16=False),
    "bf16, SGD with momentum": Kind(optimizer="SGD"),
    "bf16, Lion": Kind(optimizer="Lion"),
    "bf16, Muon": Kind(optimizer="Muon"),
    "bf16, MoE, 16 experts": Kind(experts=16),
}
LARGE_ROW = "bf16, 31.7 M parameters"
HISTORY = 25
"""Steps of a whole history: one keyframe, and points."""

STEPS = 3
"""Steps of a row that are measured."""

WARM_STEPS, NEW_WARM_STEPS = 2, 8
"""Steps before: with moments of the trained run, and with a new optimizer or a new model."""

ZSTD, ZIPNN = "gradients by torch.save, zstd -3", "gradients by zipnn"


def journal_bits(bench: Bench) -> Result:
    """Store each step of real trainings, and compare the bits for each parameter with those of other ways."""
    result = Result("journal_bits", "bits/parameter", is_higher_better=False, columns=("ratio", "over_floor"))
    result.setting = {"steps": STEPS, "history": HISTORY, "busy_cores_before": round(machine.busy_cores(), 2)}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    size = "small" if bench.is_small else "12.8 M"
    arrays = None if bench.is_small else bench.training.step(bench.training.plan.first)
    for name, kind in ROWS.items():
        is_new = arrays is None or kind.optimizer != "AdamW" or kind.experts > 0
        run = JournaledRun(settings_of(size), kind, arrays)
        _measure_row(bench, result, name, run, NEW_WARM_STEPS if is_new else WARM_STEPS, STEPS)
    run = JournaledRun(settings_of("small" if bench.is_small else "31.7 M"), Kind(is_bf16=False))
    _warm_up(run, NEW_WARM_STEPS)
    run.kind = Kind()
    _measure_row(bench, result, LARGE_ROW, run, 1, STEPS)
    _measure_history(bench, result, JournaledRun(settings_of(size), Kind(), arrays))
    result.notes.append("ratio: bytes of parameters and optimizer state / stored bytes")
    result.notes.append(
        "floor: order-0 entropy of the byte planes of the gradients that backward made, without zero rows"
    )
    result.notes.append("deltas: an ordinary commit after each step")
    return result


def _warm_up(run: JournaledRun, steps: int) -> None:
    for _ in range(steps):
        run.train()


def _measure_row(bench: Bench, result: Result, name: str, run: JournaledRun, warm_steps: int, steps: int) -> None:
    """Store a few steps of a run in every way."""
    _warm_up(run, warm_steps)
    state_nbytes = _nbytes_of(run)
    found: dict[str, list[int]] = {"journal": [], "deltas": [], "floor": []}
    with (
        open_store(bench.folder / "journal") as journal,
        open_store(bench.folder / "deltas") as deltas,
        noted_gradients(run) as gradients,
    ):
        journal.journal(*run.optimizers, replay_seconds=1e9)
        journal.commit_async(run.state, run.step_done).result()
        deltas.commit(run.state, run.step_done)
        for _ in range(steps):
            run.train()
            receipt = journal.commit_async(run.state, run.step_done).result()
            if not receipt.point:
                raise AssertionError(f"{name}: the commit has stored the whole state")
            found["journal"].append(receipt.bytes_written)
            found["deltas"].append(deltas.commit(run.state, run.step_done).bytes_written)
            found["floor"].append(sum(floor_nbytes(each.made) for each in gradients.values()))
            for peer, measure in PEERS.items():
                if peer not in result.unusable:
                    try:
                        found.setdefault(peer, []).append(measure(gradients))
                    except Exception as error:
                        result.unusable[peer] = f"{type(error).__name__}: {error}"
    for place in ("journal", "deltas"):
        machine.remove_tree(bench.folder / place)
    for way, sizes in found.items():
        _add(result, f"{name}: {way}", sizes, run.count, state_nbytes, found["floor"])


def _measure_history(bench: Bench, result: Result, run: JournaledRun) -> None:
    """Store a whole history: a keyframe, and the steps after it; all files count."""
    _warm_up(run, WARM_STEPS)
    state_nbytes, place = _nbytes_of(run), bench.folder / "journal"
    with open_store(place) as store:
        store.journal(*run.optimizers, keyframe_every=HISTORY)
        for number in range(HISTORY):
            run.train()
            receipt = store.commit_async(run.state, run.step_done).result()
            if bool(receipt.point) != (number > 0):
                raise AssertionError(f"commit {number} of a history has the wrong form")
    stored = machine.tree_nbytes(place)
    machine.remove_tree(place)
    _add(
        result,
        f"bf16, history with a keyframe every {HISTORY} steps: journal",
        [stored / HISTORY],
        run.count,
        state_nbytes,
    )


def _add(
    result: Result, name: str, sizes: Sequence[float], count: int, state_nbytes: int, floors: Sequence[float] = ()
) -> None:
    """Add a sample for each step."""
    if not sizes:
        return
    result.samples[name] = []
    for number, nbytes in enumerate(sizes):
        facts: dict[str, object] = {"ratio": state_nbytes / nbytes, "nbytes": nbytes}
        if floors and name.endswith(("journal", "zipnn", "zstd -3")):
            facts["over_floor"] = nbytes / floors[number]
        result.samples[name].append(Sample(8 * nbytes / count, facts))
    log(f"  {name}: {result.median(name):.2f} bits, {result.fact(name, 'ratio'):.2f}x")


def _nbytes_of(run: JournaledRun) -> int:
    """Return the bytes of all parameters and of the optimizers' tensors."""
    tensors = list(run.model.parameters())
    for optimizer in run.optimizers:
        for values in optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def floor_nbytes(made: np.ndarray) -> float:
    """Return the bytes of ideal order-0 coding of a gradient: of bf16 numbers if all are, without zero rows."""
    rows = made.reshape(made.shape[0] if made.ndim > 1 else 1, -1)
    words = rows[rows.any(axis=1)].view(np.uint32).reshape(-1)
    if not (words & 0xFFFF).any():
        words = (words >> np.uint32(16)).astype(np.uint16)
    return entropy.full_nbytes(words)


def _by_zstd(gradients: dict[str, Seen]) -> int:
    import zstandard

    buffer = io.BytesIO()
    torch.save({name: torch.from_numpy(each.seen) for name, each in gradients.items()}, buffer)
    return len(zstandard.ZstdCompressor(level=3).compress(buffer.getvalue()))


def _by_zipnn(gradients: dict[str, Seen]) -> int:
    form = peers.MAKERS["zipnn"]().full
    assert form is not None
    pieces = coders.pieces_of({f"gradient/{name}": each.seen for name, each in gradients.items()})
    return sum(len(form.encode(form.prepare(piece.words), None)) for piece in pieces)


PEERS: dict[str, Callable[[dict[str, Seen]], int]] = {ZSTD: _by_zstd, ZIPNN: _by_zipnn}

COPY, PLAIN, JOURNALED = "floor: copy the gradients", "a step without a journal", "a step with a journal"
UNHURRIED = "a step with a journal, after the record before was stored"
"""As where a step takes longer than its record, which takes some hundred milliseconds here."""

COST_STEPS = 8
"""Steps of a sample of ``journal_step``, after two that are not counted."""


def journal_step(bench: Bench) -> Result:
    """Measure what a step costs the trainer between backward and the next forward, with and without a journal."""
    result = Result("journal_step", "ms", is_higher_better=False)
    run = _speed_run(bench)
    copies = {name: np.zeros(tuple(value.shape), np.float32) for name, value in run.parameters.items()}
    result.setting = {"parameters": run.count, "steps": COST_STEPS, "rounds": bench.rounds}

    def copy() -> None:
        for name, parameter in run.parameters.items():
            np.copyto(copies[name], parameter.grad.numpy())  # type: ignore[union-attr]

    def copy_and_code() -> None:
        copy()
        writer = BlobWriter(Limits())
        for number, values in enumerate(copies.values()):
            store_gradient(SeenGradient(number, "float32", values.shape, values), writer, ())
        writer.encode("fast", thread_count=1)

    def floor(work: Callable[[], None]) -> Participant:
        return lambda: _timed_steps(run, before=work)

    def with_journal(*, is_saver_idle: bool) -> Participant:
        def run_once() -> Sample:
            place = bench.folder / "journal"
            with open_store(place) as store:
                store.journal(*run.optimizers, replay_seconds=1e9)
                pending = [store.commit_async(run.state, run.step_done)]

                def commit() -> None:
                    pending[0] = store.commit_async(run.state, run.step_done)

                ready = (lambda: pending[0].result()) if is_saver_idle else None
                pending[0].result()
                sample = _timed_steps(run, ready=ready, after=commit)
            machine.remove_tree(place)
            return sample

        return run_once

    participants: dict[str, Participant] = {
        COPY: floor(copy),
        "floor: copy and code the gradients": floor(copy_and_code),
        PLAIN: lambda: _timed_steps(run),
    }
    journaled = {JOURNALED: with_journal(is_saver_idle=False), UNHURRIED: with_journal(is_saver_idle=True)}
    with_ckstore(bench, result, participants, journaled)
    _note_cost(result)
    return result


def _speed_run(bench: Bench) -> JournaledRun:
    """Return a run of the bench's model with a batch of one sequence, whose step is short."""
    settings = replace(settings_of("small" if bench.is_small else "12.8 M"), batch=1)
    arrays: Arrays | None = None if bench.is_small else bench.training.step(bench.training.plan.first)
    run = JournaledRun(settings, Kind(), arrays)
    _warm_up(run, 2)
    return run


def _timed_steps(
    run: JournaledRun,
    *,
    ready: Callable[[], object] | None = None,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Sample:
    """Train, and time what is between backward and the next forward; with ``before``, time only that.

    Args:
        run: The training.
        ready: Called after backward, and not timed.
        before: Called and timed before the update.
        after: Called after the update.
    """
    seconds, seconds_after = [], []
    for _ in range(COST_STEPS + 2):
        run.backward()
        if ready is not None:
            ready()
        began = time.perf_counter()
        if before is not None:
            before()
            seconds.append(time.perf_counter() - began)
            run.update()
        else:
            run.update()
            if after is not None:
                began_after = time.perf_counter()
                after()
                seconds_after.append(time.perf_counter() - began_after)
            seconds.append(time.perf_counter() - began)
        run.zero_grad()
    some = [1e3 * each for each in seconds[2:]]
    facts = {"low": min(some), "high": max(some)}
    if seconds_after:
        facts["call"] = 1e3 * statistics.median(seconds_after[2:])
    return Sample(statistics.median(some), facts)


def _note_cost(result: Result) -> None:
    """Note what the journal adds to a step, and the copy."""
    others = PLAIN, COPY
    for name in (JOURNALED, UNHURRIED):
        if any(each not in result.samples for each in (name, *others)):
            continue
        rounds = list(
            zip(*([sample.value for sample in result.samples[each]] for each in (name, *others)), strict=True)
        )
        added = sorted(journaled - plain for journaled, plain, _ in rounds)
        calls = sorted(sample.facts["call"] for sample in result.samples[name])
        shares = sorted(
            sample.facts["call"] / copied for sample, (_, _, copied) in zip(result.samples[name], rounds, strict=True)
        )
        result.notes.append(
            f"{name}: {statistics.median(added):.1f} ms are added ({added[0]:.1f} to {added[-1]:.1f}); the call of "
            f"commit_async takes {statistics.median(calls):.1f} ms ({calls[0]:.1f} to {calls[-1]:.1f}): "
            f"{statistics.median(shares):.2f} times the copy of the gradients ({shares[0]:.2f} to {shares[-1]:.2f})"
        )


DEPTHS = (1, 10, 49)
"""How many steps after its keyframe a point is that is restored."""


def journal_restore(bench: Bench) -> Result:
    """Restore points some steps after their keyframe, with the keyframe, the optimizer's steps, and other floors."""
    result = Result("journal_restore", "s", is_higher_better=False)
    run, place, depths = _speed_run(bench), bench.folder / "journal", DEPTHS[:2] if bench.is_small else DEPTHS
    result.setting = {"parameters": run.count, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    with open_store(place) as store:
        store.journal(*run.optimizers, replay_seconds=1e9)
        first = run.step_done
        for number in range(max(depths) + 1):
            store.commit_async(run.state, run.step_done).result()
            if number < max(depths):
                run.train()

    def restoring(step: int) -> Participant:
        def run_once() -> Sample:
            with open_store(place) as store:
                store.journal(*run.optimizers)
                began = time.perf_counter()
                store.restore(step, into=run.state)
                return Sample(time.perf_counter() - began)

        return run_once

    def stepping() -> Sample:
        run.backward()
        seconds = []
        for _ in range(COST_STEPS):
            began = time.perf_counter()
            run.update()
            seconds.append(time.perf_counter() - began)
        run.zero_grad()
        return Sample(statistics.median(seconds))

    last = first + min(COST_STEPS, max(depths))
    participants = {
        "the keyframe": restoring(first),
        "a step of the optimizer": stepping,
        "floor: read and decode the gradients of a step": lambda: _decoded(place, range(first + 1, last + 1)),
        "floor: checksums of the state, on one thread": lambda: _checked(run),
    }
    participants |= {f"{depth} steps after it": restoring(first + depth) for depth in depths}
    interleave(result, participants, bench.rounds)
    for depth in depths:
        name = f"{depth} steps after it"
        if all(each in result.samples for each in (name, "the keyframe", "a step of the optimizer")):
            step = result.median("a step of the optimizer")
            share = (result.median(name) - result.median("the keyframe")) / (depth * step)
            result.notes.append(f"{name}: {share:.2f} optimizer steps for each step beyond the keyframe's restore")
    machine.remove_tree(place)
    return result


def _decoded(place: Path, steps: Sequence[int]) -> Sample:
    """Read and decode the gradients of some steps, one after the other, as a restore does while the optimizer works."""
    seconds = []
    with open_store(place) as store:
        repository = repository_of(store)
        memory, gradients = DecodeMemory(Limits()), GradientMemory()
        for step in steps:
            found = find_point(repository, step)
            assert found is not None, "the run has this point"
            began = time.perf_counter()
            stored = read_point(repository, found.state.journal, found.record, memory)()
            for each in stored.point.steps[0].gradients:
                load_gradient(each, stored.blobs, gradients)
            seconds.append(time.perf_counter() - began)
    return Sample(statistics.median(seconds))


def _checked(run: JournaledRun) -> Sample:
    """Compute the checksums that a restore compares after each step."""
    captured = capture(run.state, loaded_adapters())
    began = time.perf_counter()
    checksums_of(captured, thread_count=1)
    return Sample(time.perf_counter() - began)


REPLAYED: dict[str, tuple[Kind, dict[str, bool]]] = {
    "AdamW, for-loop": (Kind(), {"foreach": False}),
    "AdamW, foreach": (Kind(), {"foreach": True}),
    "AdamW, fused": (Kind(), {"fused": True}),
    "SGD": (Kind(optimizer="SGD"), {}),
    "Lion": (Kind(optimizer="Lion"), {}),
    "Muon": (Kind(optimizer="Muon"), {}),
}
REPLAYED_STEPS = 50


def journal_replay(bench: Bench) -> Result:
    """Replay 50 steps of each optimizer: here, and with other threads and other instructions; count other words."""
    result = Result("journal_replay", "words that differ", is_higher_better=False, columns=("refused",))
    steps = 6 if bench.is_small else REPLAYED_STEPS
    result.setting = {"steps": steps, "rounds": 1}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    for name in REPLAYED:
        _store_steps(name, bench.folder / _folder_of(name), steps, is_small=bench.is_small)
    for environment, change in ENVIRONMENTS.items():
        answers = _in_child(bench.folder, steps, change, is_small=bench.is_small)
        for name, (words, is_refused) in answers.items():
            result.samples[f"{name}, {environment}"] = [Sample(words, {"refused": int(is_refused)})]
            log(f"  {name}, {environment}: {words} words differ" + ", refused" * is_refused)
    for name in REPLAYED:
        machine.remove_tree(bench.folder / _folder_of(name))
    result.notes.append("refused: the replay has given other words, and restore has raised ReplayError")
    return result


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "same environment": {},
    "two threads instead of one": {"OMP_NUM_THREADS": "2"},
    "without AVX2": {"ATEN_CPU_CAPABILITY": "default"},
}
"""Variables of the process that replays. The training has one thread."""


def _folder_of(name: str) -> str:
    return name.replace(", ", "-")


def _store_steps(name: str, folder: Path, steps: int, *, is_small: bool) -> None:
    """Train, store each step, and write what the last one has made."""
    folder.mkdir()
    run = _replayed_run(name, is_small=is_small)
    with open_store(folder / "store") as store:
        store.journal(*run.optimizers, replay_seconds=1e9)
        store.commit_async(run.state, 0).result()
        for _ in range(steps):
            run.train()
            store.commit_async(run.state, run.step_done).result()
    np.savez(folder / "expected.npz", *_words_of(run))


def _replayed_run(name: str, *, is_small: bool) -> JournaledRun:
    kind, options = REPLAYED[name]
    settings = settings_of("small") if is_small else replace(settings_of("small"), layers=2, width=256, window=64)
    return JournaledRun(settings, replace(kind, is_bf16=False), options=options)


def _words_of(run: JournaledRun) -> list[np.ndarray]:
    """Return the bits of all parameters and of the optimizers' tensors."""
    tensors: list[torch.Tensor] = list(run.model.parameters())
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [each for each in optimizer.state[parameter].values() if isinstance(each, torch.Tensor)]
    return [tensor.detach().numpy().reshape(-1).view(np.uint32).copy() for tensor in tensors]


Answers = dict[str, tuple[int, bool]]
"""Name -> words that differ, and whether the replay was refused."""


def _in_child(folder: Path, steps: int, change: dict[str, str], *, is_small: bool) -> Answers:
    """Replay in a new process, and return what it found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **change}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "bench.cases_journal", str(folder), str(steps), *["--small"] * is_small]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    answers: Answers = json.loads(done.stdout.splitlines()[-1])
    return answers


def replay_all(folder: Path, steps: int, *, is_small: bool) -> Answers:
    """Restore the last point of each run into a new one, and count the words that are not as expected."""
    from ckstore.errors import ReplayError

    threads, answers = torch.get_num_threads(), {}
    for name in REPLAYED:
        place = folder / _folder_of(name)
        run = _replayed_run(name, is_small=is_small)
        # The run has set one thread.
        torch.set_num_threads(threads)
        with open_store(place / "store") as store:
            store.journal(*run.optimizers)
            try:
                with run.fast_products():
                    store.restore(steps, into=run.state, replay_check="last")
            except ReplayError:
                answers[name] = 0, True
                continue
        with np.load(place / "expected.npz") as stored:
            before = [stored[key] for key in stored.files]
        differing = sum(int(np.count_nonzero(a != b)) for a, b in zip(before, _words_of(run), strict=True))
        answers[name] = differing, False
    return answers


CASES: dict[str, Callable[[Bench], Result]] = {
    "journal_bits": journal_bits,
    "journal_step": journal_step,
    "journal_restore": journal_restore,
    "journal_replay": journal_replay,
}

if __name__ == "__main__":
    print(json.dumps(replay_all(Path(sys.argv[1]), int(sys.argv[2]), is_small="--small" in sys.argv)))
