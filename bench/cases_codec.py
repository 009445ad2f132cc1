"""The cases codec_*: size and single-core speed of every coder on the same trained tensors.

In a round a coder encodes the whole state, then decodes it and compares. The order of tensors, the core and the state
of the memory allocator are the same for all. Hashing, checking and writing are not included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench import ckstore_coder, coders, histories, peers
from bench.coders import Coder, Piece
from bench.measure import Participant, Result, Sample, interleave
from bench.training import Arrays
from bench.workbench import Bench, gigabytes_per_second

GAPS = (1, 10, 100)
DIRECTIONS = ("encode", "decode")


def _case(name: str, pieces: list[Piece], bench: Bench) -> Result:
    """Measure every coder on these tensors; each becomes two rows, one for each direction."""
    plain_nbytes = sum(piece.words.nbytes for piece in pieces)
    bound_nbytes = sum(piece.bound for piece in pieces)
    result = Result(name, "GB/s", is_higher_better=True, columns=("ratio", "over_bound"))
    result.setting = {
        "plain_nbytes": plain_nbytes,
        "tensors": len(pieces),
        "rounds": bench.rounds,
        "cores": 1,
        "bound_ratio": round(plain_nbytes / bound_nbytes, 4),
        "bound_ratio_by_role": _bound_by_role(pieces),
    }
    with coders.one_core():
        participants: dict[str, Participant] = {}
        for coder in _coders(plain_nbytes, result, bench):
            if coder.needs_base and pieces[0].base is None:
                continue
            try:
                participants[coder.name] = _participant(coder, pieces, bound_nbytes)
            except Exception as error:
                # Any failure of a coder becomes a line in the table and does not stop the case.
                result.unusable[coder.name] = f"{type(error).__name__}: {error}"
        interleave(result, participants, bench.rounds)
    _split_by_direction(result)
    mine = [f"ckstore: {direction}" for direction in DIRECTIONS]
    for direction, name in zip(DIRECTIONS, mine, strict=True):
        result.add_ratios([name], [other for other in result.samples if other.endswith(f": {direction}")])
    _note_sizes(result)
    return result


def _coders(nbytes: int, result: Result, bench: Bench) -> list[Coder]:
    arena = ckstore_coder.Arena(nbytes)
    makers: dict[str, Callable[[], Coder]] = {
        "memcpy": partial(ckstore_coder.memcpy, arena),
        "ckstore": partial(ckstore_coder.ckstore, arena),
        **peers.MAKERS,
    }
    found: list[Coder] = []
    for name, make in makers.items():
        if bench.tools is not None and name in peers.MAKERS and name not in bench.tools:
            continue
        try:
            found.append(make())
        except Exception as error:
            # A peer that is not installed, or not built for this machine, becomes a line in the table.
            result.unusable[name] = f"{type(error).__name__}: {error}"
    return found


def _participant(coder: Coder, pieces: Sequence[Piece], bound_nbytes: float) -> Participant:
    forms = [coder.form_for(piece) for piece in pieces]
    # Warm up: the first use allocates memory, tables and threads.
    coders.measure(coder, pieces[:1], forms[:1])

    def run() -> Sample:
        timing = coders.measure(coder, pieces, forms)
        facts = timing.facts()
        facts["over_bound"] = timing.stored_nbytes / bound_nbytes - 1
        return Sample(gigabytes_per_second(timing.plain_nbytes, timing.encode_seconds), facts)

    return run


def _split_by_direction(result: Result) -> None:
    for name, samples in list(result.samples.items()):
        del result.samples[name]
        for direction in DIRECTIONS:
            rows = []
            for sample in samples:
                facts = {key: value for key, value in sample.facts.items() if not key.startswith(DIRECTIONS)}
                facts["by_cpu_time"] = sample.facts[f"{direction}_by_cpu_time"]
                value = sample.value if direction == "encode" else float(str(sample.facts["decode"]))
                rows.append(Sample(value, facts))
            result.samples[f"{name}: {direction}"] = rows


def _bound_by_role(pieces: Sequence[Piece]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for piece in pieces:
        both = sums.setdefault(piece.role, [0.0, 0.0])
        both[0] += piece.words.nbytes
        both[1] += piece.bound
    return {role: round(plain / bound, 4) for role, (plain, bound) in sums.items()}


def _note_sizes(result: Result) -> None:
    """Describe the sizes in words, smallest first."""
    sizes: dict[str, float] = {}
    for name in result.samples:
        ratio = result.fact(name, "ratio")
        if ratio is not None:
            sizes[name.partition(":")[0]] = ratio
    listed = ", ".join(f"{name} {ratio:.4f}" for name, ratio in sorted(sizes.items(), key=lambda pair: -pair[1]))
    result.notes.append(f"plain/stored: bound {result.setting['bound_ratio']}, {listed}")


def _full(name: str, arrays_of: Callable[[Arrays], Arrays], bench: Bench) -> Result:
    trained = bench.training
    return _case(name, coders.pieces_of(arrays_of(trained.step(trained.plan.history[-1]))), bench)


def _delta(name: str, gap: int, arrays_of: Callable[[Arrays], Arrays], bench: Bench) -> Result:
    trained = bench.training
    older, newer = (arrays_of(trained.step(step)) for step in (trained.plan.first, trained.plan.first + gap))
    return _case(name, coders.pieces_of(newer, older), bench)


def _described(case: Callable[[Bench], Result], line: str) -> Callable[[Bench], Result]:
    case.__doc__ = line
    return case


def _all() -> dict[str, Callable[[Bench], Result]]:
    kinds: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
        "fp32": (lambda arrays: arrays, "weights and moments in fp32"),
        "bf16": (histories.rounded, "bf16 weights"),
    }
    found = {}
    for kind, (arrays_of, what) in kinds.items():
        name = f"codec_full_{kind}"
        found[name] = _described(partial(_full, name, arrays_of), f"Code {what} without a base, on one core.")
        for gap in GAPS:
            name = f"codec_delta_{kind}_gap{gap}"
            line = f"Code {what} against those a gap of {gap} before, on one core."
            found[name] = _described(partial(_delta, name, gap, arrays_of), line)
    return found


CASES = _all()
