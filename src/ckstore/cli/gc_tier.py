"""``ckstore gc PATH --tier NAME``: remove from a tier what was dropped and freed here, and packs that nobody needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckstore.cli import output
from ckstore.cli.options import opened
from ckstore.errors import CorruptError, UsageError

if TYPE_CHECKING:
    from ckstore.format.layout import ManifestName
    from ckstore.store.tier_gc import TierGc


def collect_there(
    path: str,
    tier: str | None,
    others: dict[str, Any],
    given: dict[str, Any],
    *,
    as_json: bool,
    allow_shared_folder: bool,
) -> None:
    """Collect in a tier, and tell what became of it.

    Args:
        path: The store whose tier it is.
        tier: Its name.
        others: Options that say nothing of a tier; refused where they were given.
        given: Options of the collection.
        as_json: Print JSON.
        allow_shared_folder: The folder may be writable by others.

    Raises:
        UsageError: There is no tier, or an option that does not belong here.
        CorruptError: Packs were left alone, since a manifest cannot be read.
    """
    if tier is None:
        raise UsageError("--clear-lists needs --tier NAME", todo="lists of collectors lie in tiers")
    wrong = [name for name, value in others.items() if value]
    if wrong:
        raise UsageError(
            f"{wrong[0]} does not go with --tier",
            todo="collect here first, by rules; what was dropped and freed here then goes in the tier",
        )
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        report = store.gc_tier(tier, **given)
    if as_json:
        output.print_json(_json_of(report))
    else:
        for line in _lines_of(report):
            output.say(line)
    if report.stop:
        raise CorruptError(f"packs were left alone: {report.stop}", where=report.address)


def _json_of(report: TierGc) -> dict[str, Any]:
    return {
        "is_dry_run": report.is_dry_run,
        "tier": report.tier,
        "address": report.address,
        "dropped": [_name(name) for name in report.dropped],
        "superseded": [_name(name) for name in report.superseded],
        "packs": [{"pack_id": pack_id.hex(), "nbytes": nbytes} for pack_id, nbytes in sorted(report.packs.items())],
        "freed_nbytes": report.freed_nbytes,
        "young_nbytes": report.young_nbytes,
        "rewrites": [
            {"pack_id": each.pack_id.hex(), "nbytes": each.nbytes, "packed_nbytes": each.packed_nbytes}
            for each in report.rewrites
        ],
        "repacked": [pack_id.hex() for pack_id in report.repacked.pack_ids],
        "repacked_nbytes": report.repacked.nbytes_written,
        "replaced_manifests": report.repacked.manifests,
        "renewed_manifests": report.renewed,
        "troubles": report.repacked.troubles,
        "lists": report.lists,
        "stop": report.stop,
    }


def _name(name: ManifestName) -> dict[str, Any]:
    return {"run": name.run, "seq": name.seq, "step": name.step, "generation": name.generation}


def _lines_of(report: TierGc) -> list[str]:
    would, size = ("would be " if report.is_dry_run else ""), output.size
    lines = [
        f"{_count(len(report.dropped), 'dropped checkpoint')} {would}removed from {report.address}.",
        f"{_count(len(report.packs), 'pack')} {would}removed there: {size(report.freed_nbytes)}.",
    ]
    if report.superseded:
        lines.append(f"{_count(len(report.superseded), 'superseded manifest')} {would}removed.")
    if report.rewrites and report.is_dry_run:
        become = f"{size(report.rewritten_nbytes)} become {size(report.written_nbytes)}"
        lines.append(f"{_count(len(report.rewrites), 'pack')} there would be rewritten: {become}.")
    if report.repacked.pack_ids:
        lines.append(
            f"{_count(len(report.repacked.pack_ids), 'pack')} there rewritten into "
            f"{size(report.repacked.nbytes_written)}; the old ones go in a later collection there, after the trash "
            "here has been freed of the manifests that named them."
        )
    lines += [f"{trouble}." for trouble in report.repacked.troubles]
    if report.lists:
        lines.append(f"{_count(report.lists, 'list')} of collectors that do not live any more removed.")
    if report.young_nbytes:
        lines.append(f"{size(report.young_nbytes)} there that nobody names are too young to be garbage.")
    return lines


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
