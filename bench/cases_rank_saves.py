"""The cases ranks_save, ranks_async, ranks_restore and ranks_one: saves and loads by several ranks of one machine."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import background, histories, machine
from bench.measure import Participant, Result, Sample, interleave
from bench.processor_time import Meter
from bench.rank_group import Facts, RankGroup
from bench.workbench import Bench, facts_of, open_store

VARIANTS = ("none", "fast")
HSDP, FSDP, ALONE = (2, 2), (4,), (1,)
"""Shapes of device meshes: the last dimension cuts tensors, the others replicate them."""

FEWER, MORE = (2,), (4,)
"""The worlds that ``ranks_restore`` changes between."""

NOT_INSTALLED = "not installed"
ALL_RANKS = "processor: seconds of all ranks together, without threads of the kernel and without other processes"


def ranks_save(bench: Bench) -> Result:
    """Save an HSDP state by four ranks, of which pairs hold the same, until it is durable."""
    result = _result(bench, "ranks_save", HSDP)
    result.columns = ("processor", "bytes_per_unique")
    place = bench.folder / "saved"
    with RankGroup(bench, HSDP) as ranks:
        unique = _state_nbytes(result, ranks, replicas=HSDP[0])
        machine.check_space(bench.folder, int(3.5 * unique))

        def by(call: str, **options: object) -> Participant:
            def run() -> Sample:
                facts = ranks.call(call, place=str(place), **options)
                ratio = machine.tree_nbytes(place) / unique
                machine.remove_tree(place)
                return _sample(_wall(facts), facts, bytes_per_unique=ratio)

            return run

        others = {"DCP": by("save_dcp")} | _if_installed(result, by)
        mine = {f"ckstore {name}": by("save_ckstore", compression=name) for name in VARIANTS}
        _run(bench, result, others, mine, place)
    result.notes.append("DCP with sync_files=True; rank 0 calls fsync on everything that DCP and others leave to it")
    result.notes.append(ALL_RANKS)
    return result


def _if_installed(result: Result, by: Callable[[str], Participant]) -> dict[str, Participant]:
    if importlib.util.find_spec("torch_checkpointing") is None:
        result.unusable["torch_checkpointing"] = NOT_INSTALLED
        return {}
    return {"torch_checkpointing": by("save_torch_checkpointing")}


def ranks_async(bench: Bench) -> Result:
    """Begin a background save on four ranks, and of the same bytes on one rank, until the call has returned."""
    result = _result(bench, "ranks_async", FSDP)
    result.columns = ("step_wait", "durable", "processor")
    with RankGroup(bench, FSDP) as four, RankGroup(bench, ALONE) as one:
        nbytes = _state_nbytes(result, four)
        one.call("make")
        machine.check_space(bench.folder, int(3.5 * nbytes))
        place = bench.folder / "saved"

        def by(ranks: RankGroup, call: str, **options: object) -> Participant:
            def run() -> Sample:
                facts = ranks.call(call, place=str(place), **options)
                for path in bench.folder.glob("saved*"):
                    machine.remove_tree(path)
                # Every rank trains on when its own call has returned. All wait for the slowest at the next collective.
                stall = max(each["ended"] - each["began"] for each in facts)
                longest = {name: max(each.get(name, 0.0) for each in facts) for name in ("step_wait", "durable")}
                return _sample(stall, facts, **longest)

            return run

        others = {f"DCP {kind}, 4 ranks": by(four, "async_dcp", kind=kind) for kind in ("THREAD", "PROCESS")}
        groups = {"1 rank, ranks=None": one, "4 ranks": four}
        mine = {
            f"ckstore {how}, {who}": by(ranks, "async_ckstore", compression="fast", is_guarded=how == "guarded")
            for how in ("blocking", "guarded")
            for who, ranks in groups.items()
        }
        _run(bench, result, others, mine, place)
    _note_against_one_rank(result)
    result.notes.append("ckstore: prewarmed; the third commit of a new store, compression fast. DCP: reused buffers")
    result.notes.append(
        "step_wait: what the optimizer's step waits 0.5 s after the call, if nothing computes meanwhile"
    )
    return result


def _note_against_one_rank(result: Result) -> None:
    for how in ("blocking", "guarded"):
        many, one = (f"ckstore {how}, {who}" for who in ("4 ranks", "1 rank, ranks=None"))
        if many in result.samples and one in result.samples:
            rounds = [a.value / b.value for a, b in zip(result.samples[many], result.samples[one], strict=True)]
            result.notes.append(
                f"{how}: with 4 ranks {statistics.median(rounds):.2f} times the stall of one rank with the same bytes "
                f"({min(rounds):.2f} to {max(rounds):.2f})"
            )


def ranks_restore(bench: Bench) -> Result:
    """Load a checkpoint into shards of another number of ranks, with cold caches: 4 to 2, and 2 to 4."""
    result = _result(bench, "ranks_restore", MORE)
    result.columns = ("processor",)
    with RankGroup(bench, MORE) as more, RankGroup(bench, FEWER) as fewer:
        nbytes = _state_nbytes(result, more)
        fewer.call("make")
        machine.check_space(bench.folder, int(7.0 * nbytes))
        others: dict[str, Participant] = {}
        mine: dict[str, Participant] = {}
        for saving, loading in ((more, fewer), (fewer, more)):
            change = f"{saving.world} to {loading.world} ranks"
            places = _saved(bench, saving)
            others[f"{change}: DCP"] = _loading(loading, "load_dcp", places["DCP"])
            for name in VARIANTS:
                mine[f"{change}: ckstore {name}"] = _loading(loading, "load_ckstore", places[name])
        _run(bench, result, others, mine, None)
    for place in bench.folder.glob("loaded-*"):
        machine.remove_tree(place)
    result.ratios = {
        pair: values
        for pair, values in result.ratios.items()
        if len({name.partition(":")[0] for name in pair.split(" / ")}) == 1
    }
    result.notes.append(ALL_RANKS)
    return result


def _saved(bench: Bench, ranks: RankGroup) -> dict[str, Path]:
    """Save by all tools; return the places."""
    places = {name: bench.folder / f"loaded-{ranks.world}-{name}" for name in ("DCP", *VARIANTS)}
    ranks.call("save_dcp", place=str(places["DCP"]))
    if bench.has_ckstore is None:
        for name in VARIANTS:
            ranks.call("save_ckstore", place=str(places[name]), compression=name)
    return places


def _loading(ranks: RankGroup, call: str, place: Path) -> Participant:
    def run() -> Sample:
        machine.make_cold(place)
        facts = ranks.call(call, place=str(place))
        return _sample(_wall(facts), facts)

    return run


def _result(bench: Bench, case: str, mesh: tuple[int, ...]) -> Result:
    values = "synthetic" if bench.is_small else "trained"
    setting: dict[str, object] = {"mesh": "x".join(map(str, mesh)), "rounds": bench.rounds, "values": values}
    if not bench.is_small:
        # Here, because ranks that all train at the same time would disturb each other.
        histories.trained_donors(bench.cache)
    return Result(case, "s", is_higher_better=False, setting=setting)


def _state_nbytes(result: Result, ranks: RankGroup, *, replicas: int = 1) -> float:
    """Have the ranks make their states; return the bytes that they hold together, replicas once."""
    nbytes = sum(facts["nbytes"] for facts in ranks.call("make")) / replicas
    result.setting["state_nbytes"] = int(nbytes)
    return nbytes


def _wall(facts: list[Facts]) -> float:
    """Return the seconds from when the first rank began until the last one ended. They have one clock."""
    return max(each["ended"] for each in facts) - min(each["began"] for each in facts)


def _sample(value: float, facts: list[Facts], **more: float) -> Sample:
    stages = {name: max(each[name] for each in facts) for name in facts[0] if name.startswith("stage ")}
    return Sample(value, {"processor": sum(each["cpu"] for each in facts), **more, **stages})


def _run(
    bench: Bench, result: Result, others: dict[str, Participant], mine: dict[str, Participant], place: Path | None
) -> None:
    """Run each participant once unmeasured, and then the rounds. What fails first is left out."""
    if bench.has_ckstore is not None:
        result.unusable["ckstore"], mine = bench.has_ckstore, {}
    participants = others | mine
    for name, run in participants.items():
        try:
            run()
        except Exception as error:
            result.unusable[name] = f"{type(error).__name__}: {error}"
            if place is not None:
                machine.remove_tree(place)
    interleave(result, participants, bench.rounds)
    result.add_ratios(list(mine), list(others))


def ranks_one(bench: Bench) -> Result:
    """Commit and restore on one process: without ranks, and as the only rank of a job."""
    result = bench.result("ranks_one", "s", is_higher_better=False)
    result.columns = ("processor",)
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    machine.check_space(bench.folder, int(7.0 * histories.nbytes_of(bench.state)))
    with ExitStack() as stack:
        participants = dict(_on_one_rank(bench, stack))
        for run in participants.values():
            run()
        interleave(result, participants, bench.rounds)
    for name in participants:
        what, _, who = name.rpartition(": ")
        if who == ONLY_RANK:
            result.add_ratios([name], [f"{what}: {NO_RANKS}"])
    result.notes += [
        f"{pair.partition(':')[0]}: {1 / statistics.median(values) - 1:+.1%} as the only rank of a job"
        for pair, values in result.ratios.items()
        if values
    ]
    return result


NO_RANKS, ONLY_RANK = "ranks=None", "Ranks(0, 1)"


def _on_one_rank(bench: Bench, stack: ExitStack) -> Iterator[tuple[str, Participant]]:
    """Yield the participants of ``ranks_one``: for each operation both ways next to each other."""
    import ckstore

    state, into, names = bench.state, histories.blank_like(bench.state), itertools.count()

    def opened(who: str, compression: str, place: Path) -> Any:
        policy: Any = {"compression": compression}
        ranks = ckstore.Ranks(0, 1) if who == ONLY_RANK else None
        if ranks is not None:
            stack.callback(ranks.close)
        return ckstore.open(str(place), run="main", policy=ckstore.Policy(**policy), ranks=ranks)

    def commit(who: str, compression: str) -> Sample:
        place, meter = bench.folder / f"one-{next(names)}", Meter()
        with opened(who, compression, place) as store, meter.running():
            receipt = store.commit(state, 1)
        machine.remove_tree(place)
        return _timed(meter, **facts_of(receipt))

    def begin(who: str, compression: str) -> Sample:
        place, meter = bench.folder / f"one-{next(names)}", Meter()
        with opened(who, compression, place) as store:
            store.prewarm(state)
            for step in range(2):
                background.change(state)
                store.commit_async(state, step).result()
            background.change(state)
            with meter.running():
                pending = store.commit_async(state, 2)
            pending.result()
        machine.remove_tree(place)
        return _timed(meter)

    def restore(who: str, compression: str) -> Sample:
        place, meter = bench.folder / f"one-saved-{compression}", Meter()
        if not place.exists():
            with open_store(place, compression) as store:
                store.commit(state, 1)
        histories.clear(into)
        machine.make_cold(place)
        with opened(who, compression, place) as store, meter.running():
            store.restore(into=into)
        return _timed(meter)

    # Restores come first: the background commits change the state.
    works = {"restore": restore, "commit": commit, "commit_async returns": begin}
    for what, work in works.items():
        for compression in VARIANTS:
            for who in (NO_RANKS, ONLY_RANK):
                yield f"{what}, {compression}: {who}", partial(work, who, compression)


def _timed(meter: Meter, **facts: object) -> Sample:
    return Sample(meter.wall, {"processor": meter.seconds, **facts})


CASES: dict[str, Callable[[Bench], Result]] = {
    "ranks_save": ranks_save,
    "ranks_async": ranks_async,
    "ranks_restore": ranks_restore,
    "ranks_one": ranks_one,
}
"""Cases of several ranks on this machine."""
