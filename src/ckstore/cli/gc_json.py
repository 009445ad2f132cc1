"""The report of a collection, for programs: the plan is the same document in a dry run and in a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckstore.cli import output

if TYPE_CHECKING:
    from ckstore.collection import GcDone, GcPlan, GcReport
    from ckstore.format.layout import ManifestName
    from ckstore.retention.plan import RunPlan
    from ckstore.store.tier_proof import Unproven


def json_of(report: GcReport) -> dict[str, Any]:
    """Return the whole report."""
    return {
        "is_dry_run": report.is_dry_run,
        "refused": report.refused,
        "runs": [_run(plan) for plan in report.runs],
        "plan": _plan(report.plan),
        "done": None if report.done is None else _done(report.done),
        "freed_nbytes": report.freed_nbytes,
        "later_nbytes": report.later_nbytes,
        "later_time": None if report.plan.free_ns is None else output.iso_time(report.plan.free_ns),
    }


def _run(plan: RunPlan) -> dict[str, Any]:
    return {
        "run": plan.run,
        "rules": plan.rules,
        "blocked": plan.blocked,
        "notes": plan.notes,
        "checkpoints": [
            {
                "seq": verdict.seq,
                "step": verdict.step,
                "time": output.iso_time(verdict.time_ns),
                "is_kept": verdict.is_kept,
                "reasons": verdict.reasons,
            }
            for verdict in plan.verdicts
        ],
    }


def _plan(plan: GcPlan) -> dict[str, Any]:
    return {
        "stop": plan.stop,
        "drops": [_name(name) for name in plan.drops],
        "unfinished": [_name(name) for name in plan.unfinished],
        "superseded": [_name(name) for name in plan.superseded],
        "put_back": [_name(trashed.name) for trashed in plan.put_back],
        "rescues": [pack_id.hex() for pack_id in plan.rescues],
        "moves": [{"pack_id": move.pack_id.hex(), "nbytes": move.nbytes} for move in plan.moves],
        "rewrites": [
            {
                "pack_id": rewrite.pack_id.hex(),
                "nbytes": rewrite.nbytes,
                "nbytes_after": rewrite.packed_nbytes,
                "manifests": len(rewrite.manifests),
            }
            for rewrite in plan.rewrites
        ],
        "purges": [{"trash_id": folder.gc_id, "nbytes": folder.nbytes} for folder in plan.purges],
        "waiting_nbytes": plan.waiting_nbytes,
        "young_nbytes": plan.young_nbytes,
        "drafts": [draft.path for draft in plan.drafts],
        "unproven": [_unproven(each) for each in plan.unproven],
    }


def _unproven(each: Unproven) -> dict[str, Any]:
    return {
        "pack_id": each.pack_id.hex(),
        "tier": each.tier,
        "problem": each.problem,
        "is_damage": each.is_damage,
    }


def _done(done: GcDone) -> dict[str, Any]:
    return {
        "dropped": [_name(name) for name in done.dropped],
        "spared": [{**_name(name), "why": why} for name, why in sorted(done.spared.items())],
        "rescued": done.rescued,
        "superseded": done.superseded,
        "moved_packs": done.moved_packs,
        "moved_nbytes": done.moved_nbytes,
        "freed_files": done.freed_files,
        "freed_nbytes": done.freed_nbytes,
        "repacked": [pack_id.hex() for pack_id in done.repacked.pack_ids],
        "repacked_nbytes": done.repacked.nbytes_written,
        "replaced_manifests": done.repacked.manifests,
        "troubles": done.repacked.troubles,
        "drafts": done.drafts,
        "intents": done.intents,
        "waits_for": done.waits_for,
        "unproven": [_unproven(each) for _, each in sorted(done.unproven.items())],
        "waits": done.waits,
        "stop": done.stop,
    }


def _name(name: ManifestName) -> dict[str, Any]:
    return {"run": name.run, "seq": name.seq, "step": name.step, "generation": name.generation}
