"""How well training resumes from a residual checkpoint, and at how many bits per parameter.

    python -m bench.resume_gap                        # trains twice, then every policy: hours of two cores, cached
    python -m bench.resume_gap --only 'near*,small*'  # some policies
    python -m bench.resume_gap --beta2 0.999 --quick  # a tiny model, in a minute; saves no record

A policy stores an exact keyframe and then a chain of ten residuals, each relative to the reconstruction of the previous
one. Training resumes from the last one (and, for the most important policies, from the fifth) for 100 steps with the
data that the original run saw. Every loss is compared with that of the original run, which an exact resume repeats bit
for bit. Results are: bits by part, and the ratio to 96 bits per parameter; the loss on held-out text at restore; the
mean difference of training losses (excess) and the mean absolute difference (gap); the largest first update, compared
with that of the exact resume, and its closed-form bound. See docs/BENCH.md.

The result of every finished policy is cached, so that an interrupted run continues. If ``CKSTORE_BENCH_PAUSE_FILE``
names a file, the program waits between two steps while that file exists.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, measure, resume_baselines, resume_plots, resume_policies, resume_speed, resume_training
from bench.measure import Result, Sample
from bench.resume_policies import CandidatePolicy, Link
from bench.resume_training import Plan, Trained
from bench.training import Arrays, Log

HERE = Path(__file__).resolve().parent
PLAIN_BITS = 96.0
WIDTH = 120
QUICK = ("near()", "small()", "ExCP, c = 2.5", "no moments", "stale weights")
HEADINGS = ("ratio", "all", "bits w + m + v", "gap", "excess", "held out", "first", "bound")
Found = dict[str, Any]


def spike_bound(arrays: Arrays, beta2: float, step: int) -> float:
    """Return the largest |update| / lr that the next step of Adam can make, over every gradient.

    By Cauchy-Schwarz, for constant betas, without epsilon and weight decay; infinite where a first moment is nonzero
    and its second moment is zero.
    """
    beta1, greatest = 0.9, 0.0
    for path, first in arrays.items():
        if path.startswith("m/"):
            second = arrays["v" + path[1:]]
            with np.errstate(divide="ignore", invalid="ignore"):
                quotients = np.abs(first) / np.sqrt(second)
            greatest = max(greatest, float(np.where(first == 0, 0.0, quotients).max()))
    inner = beta1**2 * greatest**2 / beta2 + (1 - beta1) ** 2 / (1 - beta2)
    return math.sqrt(inner) * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def follow(trained: Trained, candidate: CandidatePolicy, link: Link) -> Found:
    """Resume from one link of a chain, and compare with the original run."""
    resumed = trained.resume(link.arrays, link.step, skipped_batches=candidate.skipped_batches)
    differences = np.array(resumed.losses) - np.array(trained.exact_losses(link.step))
    return {
        "step": link.step,
        "losses": resumed.losses,
        "excess": float(differences.mean()),
        "gap": float(np.abs(differences).mean()),
        "first_gap": float(differences[0]),
        "held_out": resumed.held_out_before,
        "held_out_after": resumed.held_out_after,
        "first_update": resumed.first_update,
        "spike_bound": spike_bound(link.arrays, trained.plan.beta2, link.step),
    }


def examine(trained: Trained, candidate: CandidatePolicy, folder: Path) -> Found:
    """Store the chain with one policy, and resume from it."""
    plan = trained.plan
    points = plan.points if candidate.is_named else plan.points[-1:]
    found: Found = {"name": candidate.name, "kind": candidate.kind, "beta2": plan.beta2, "bits": [], "points": []}
    count = trained.facts()["parameters"]
    for link in candidate.chain(trained, folder):
        found["bits"].append({role: bits / count for role, bits in link.bits.items()} | link.facts)
        if link.step in points:
            found["points"].append(follow(trained, candidate, link))
    return found


def ensure(trained: Trained, candidate: CandidatePolicy, cache: Path, *, log: Log) -> Found:
    """Return the result of a policy; measure it if it is not cached."""
    word = re.sub(r"[^a-z0-9.]+", "-", candidate.name.lower()).strip("-")
    path = cache / f"{trained.plan.name}-found" / f"{word}.json"
    # The key contains the parameters, so that a changed policy is measured again.
    recipe = json.dumps(_recipe(candidate), sort_keys=True, default=str)
    if path.exists():
        found = json.loads(path.read_text())
        if found.pop("recipe") == recipe:
            return dict(found)
    found = examine(trained, candidate, cache / f"{trained.plan.name}-store")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"recipe": recipe, **found}) + "\n")
    last = found["points"][-1]
    log(f"  {candidate.name}, beta2 {trained.plan.beta2}: gap {last['gap']:.4f}, excess {last['excess']:+.4f}")
    return found


def _recipe(candidate: CandidatePolicy) -> dict[str, object]:
    residual = None if candidate.residual is None else asdict(candidate.residual)
    return {"residual": residual, "make": repr(candidate.make).split(" at 0x")[0], "skipped": candidate.skipped_batches}


def sample_of(found: Found, exact: Found) -> Sample:
    """Return the values of a policy for the table and the record."""
    links = found["bits"]
    # The first residual has an exact base, and is smaller than those that follow.
    steady = links[1:] or links
    bits = {role: float(np.mean([link[role] for link in steady])) for role in ("w", "m", "v", "exact")}
    last = found["points"][-1]
    total = sum(bits.values())
    facts = {
        "ratio": PLAIN_BITS / total if total else math.inf,
        "bits": total,
        **{f"bits_{role}": value for role, value in bits.items()},
        **{name: last[name] for name in ("excess", "first_gap", "held_out", "held_out_after", "first_update")},
        "first": last["first_update"] / exact["points"][-1]["first_update"],
        "bound": last["spike_bound"],
        "beta2": found["beta2"],
        "kind": found["kind"],
        "points": [{key: point[key] for key in point if key != "losses"} for point in found["points"]],
        "bytes_written": [link["bytes_written"] for link in links if "bytes_written" in link],
    }
    return Sample(last["gap"], facts)


def result_of(
    everything: dict[float, list[Found]],
    exact: dict[float, Found],
    plans: dict[float, Plan],
    keyframes: dict[float, float],
) -> Result:
    """Make the table and the record; ``keyframes`` is the compression ratio of a keyframe, by beta2."""
    result = Result("resume_gap", "nats of mean absolute gap", is_higher_better=False)
    for beta2, findings in everything.items():
        for found in findings:
            sample = sample_of(found, exact[beta2])
            ratio = float(str(sample.facts["ratio"]))
            sample.facts["ratio_with_keyframes"] = resume_policies.with_keyframes(ratio, keyframes[beta2])
            result.samples[f"{found['name']}, beta2 {beta2}"] = [sample]
        result.setting[f"keyframe_ratio_{beta2}"] = keyframes[beta2]
        result.setting[f"first_update_exact_{beta2}"] = exact[beta2]["points"][-1]["first_update"]
        result.setting[f"held_out_exact_{beta2}"] = exact[beta2]["points"][-1]["held_out"]
    plan = next(iter(plans.values()))
    result.setting |= {"residuals": plan.residuals, "gap_steps": plan.gap, "resumed": plan.resumed}
    result.setting["keyframe_every"] = resume_policies.KEYFRAME_EVERY
    described = ", ".join(f"{ratio:.2f}x at beta2 {beta2}" for beta2, ratio in keyframes.items())
    result.notes += [
        f"ratio: of a residual; all: of a history of which one checkpoint in {resume_policies.KEYFRAME_EVERY} is exact"
        f" ({described})",
        "gap, excess: training loss against the exact resume, mean magnitude and mean over the resumed steps (nats)",
        "first: largest first update, against the exact resume's; bound: largest next update / lr over every gradient",
        "bits of baselines: ideal entropy; of ckstore: frames as stored; exact tensors are counted in the ratio",
    ]
    return result


def show(result: Result) -> None:
    """Print the table."""
    table = Table(title=f"{result.case}: chain of {result.setting['residuals']} residuals", title_justify="left")
    table.add_column("")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, samples in result.samples.items():
        facts = {key: float(str(value)) for key, value in samples[0].facts.items() if isinstance(value, float)}
        parts = " + ".join(f"{facts[f'bits_{role}']:.2f}" for role in ("w", "m", "v"))
        cells = [
            f"{facts['ratio']:.1f}x",
            f"{facts['ratio_with_keyframes']:.1f}x",
            parts,
            f"{samples[0].value:.4f}",
            f"{facts['excess']:+.4f}",
        ]
        table.add_row(name, *cells, f"{facts['held_out']:.4f}", f"{facts['first']:.2f}", f"{facts['bound']:.3g}")
    console = Console()
    # Names and numbers of one policy stay on one line, however narrow the terminal is.
    console.width = max(console.width, WIDTH)
    console.print(table)
    for note in result.notes:
        console.print(note, style="dim", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, measure the selected policies, print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few policies; keeps no record")
    parser.add_argument("--only", default="*", help="names or patterns of policies, with commas")
    parser.add_argument("--beta2", type=float, action="append", choices=sorted(resume_training.PLANS))
    parser.add_argument("--cache", type=Path, default=Path(".bench-cache"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--plots", type=Path, default=HERE.parent / "docs" / "plots")
    parser.add_argument("--cached", action="store_true", help="only show what was found earlier")
    given = parser.parse_args(arguments)
    given.cache.mkdir(parents=True, exist_ok=True)
    known = resume_training.TINY_PLANS if given.quick else resume_training.PLANS
    plans = {beta2: known[beta2] for beta2 in given.beta2 or sorted(known)}
    wanted = given.only.split(",") if given.only != "*" or not given.quick else list(QUICK)
    chosen = [
        one for one in resume_policies.candidate_policies() if any(fnmatch.fnmatch(one.name, name) for name in wanted)
    ]
    if not chosen:
        parser.error(f"no such policy: {given.only}")
    everything, exact = examine_all(plans, chosen, given.cache, is_cached=given.cached)
    trained = {beta2: resume_training.ensure(given.cache, plan, log=measure.log) for beta2, plan in plans.items()}
    keyframes = {beta2: resume_policies.keyframe_ratio(run, given.cache / "keyframe") for beta2, run in trained.items()}
    result = result_of(everything, exact, plans, keyframes)
    others = machine.busy_cores()
    result.setting["busy_cores_before"] = round(others, 2)
    if others > measure.BUSY_CORES:
        result.notes.append(f"speeds: not alone, {others:.1f} cores were busy with something else")
    result.setting["speed"] = resume_speed.speeds(trained[min(plans)], rounds=1 if given.quick else 5)
    show(result)
    resume_speed.show(result.setting["speed"])
    if not given.quick:
        measure.log(f"kept in {measure.save(result, given.results, given.cache)}")
        for path in resume_plots.draw(everything, exact, given.plots):
            measure.log(f"drawn: {path}")
    else:
        shutil.rmtree(given.cache / "speed", ignore_errors=True)
    return 0


def examine_all(
    plans: dict[float, Plan], chosen: list[CandidatePolicy], cache: Path, *, is_cached: bool = False
) -> tuple[dict[float, list[Found]], dict[float, Found]]:
    """Return the results of every policy, and of the exact resume, by beta2."""
    trained = {beta2: resume_training.ensure(cache, plan, log=measure.log) for beta2, plan in plans.items()}
    yardstick = CandidatePolicy("exact", "yardstick", make=resume_baselines.exact)
    exact: dict[float, Found] = {}
    for beta2, run in trained.items():
        exact[beta2] = ensure(run, yardstick, cache, log=measure.log)
        gap = exact[beta2]["points"][-1]["gap"]
        if gap != 0.0:
            raise AssertionError(f"an exact state does not resume exactly (gap {gap}): no other gap means anything")
    everything: dict[float, list[Found]] = {beta2: [] for beta2 in plans}
    for candidate in chosen:
        for beta2, run in trained.items():
            folder = cache / f"{run.plan.name}-found"
            word = re.sub(r"[^a-z0-9.]+", "-", candidate.name.lower()).strip("-")
            if not is_cached or (folder / f"{word}.json").exists():
                everything[beta2].append(ensure(run, candidate, cache, log=measure.log))
    return everything, exact


if __name__ == "__main__":
    sys.exit(main())
