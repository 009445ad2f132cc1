"""One self-contained HTML page about a store. ``gather`` reads manifests only; ``page_of`` builds the page.

Invariants of the data:
- What cannot be read is shown as damaged, and does not hide the rest.
- Texts from users, such as tensor names, tags and metrics, contain printable characters only.

Invariants of the page:
- It needs no network and no other file, and runs only its own script.
- Data from a store is never part of the markup. It is a block of JSON, which the script inserts as text.
- Its content security policy forbids loading, and allows only this style and this script, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from ckstore.errors import CkstoreError
from ckstore.format.manifest import Manifest
from ckstore.format.paths import ManifestName
from ckstore.format.tree import TensorNode, leaves_of
from ckstore.hashing import PackId
from ckstore.ops.gc.run import GcLimits, GcReport, collect_store
from ckstore.ops.inspect.stats import group_of
from ckstore.ops.inspect.usage import journal_usage
from ckstore.ops.stored_policies import stored_policy
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.damage import lost_tensors
from ckstore.store.listing import Entry, log_of_run
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.results import Info


LOST_SHOWN_MAX = 40
TEXT_LENGTH_MAX = 400


def gather(
    repository: Repository, gc: GcReport | None, gc_problem: str, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return what the page shows, as JSON data.

    Args:
        repository: The store.
        gc: The plan of a collection; None if it could not be made.
        gc_problem: Why it could not be made; empty otherwise.
        on_progress: Called with the number of checkpoints done and the total.
    """
    runs = {run: log_of_run(repository.for_run(run)) for run in repository.runs()}
    entries = [(run, entry) for run, log in runs.items() for entry in log.entries]
    # By time, so that a chunk counts as reused if an earlier commit of any run contains it.
    entries.sort(key=lambda pair: (0 if pair[1].info is None else pair[1].info.time_ns, pair[1].seq))
    found = _Gatherer(repository)
    rows: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for number, (run, entry) in enumerate(entries):
        rows[run].append(found.row_of(run, entry))
        if on_progress is not None:
            on_progress(number + 1, len(entries))
    return {
        "store": shown(repository.backend.root),
        "made_ms": repository.clock.now_ns() // 10**6,
        "runs": [{"name": run, "entries": sorted(rows[run], key=lambda row: -int(row["seq"]))} for run in rows],
        "tiers": found.tiers(),
        "journals": [{"segments": each.files, "nbytes": each.nbytes} for each in journal_usage(repository)],
        "gc": None if gc is None else _gc_facts(gc),
        "gc_problem": shown(gc_problem),
    }


def shown(text: object) -> str:
    """Return a text that is safe to display: printable, and not too long."""
    line = str(text)[:TEXT_LENGTH_MAX]
    return line if line.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in line)


@dataclass(slots=True)
class _Gatherer:
    """What was read so far, in order of time."""

    repository: Repository
    _seen: set[bytes] = field(default_factory=set)
    _pack_sizes: dict[str, dict[PackId, int]] = field(default_factory=dict)
    _needed: dict[tuple[PackId, int], int] = field(default_factory=dict)
    _tier_of: dict[PackId, str] = field(default_factory=dict)

    def row_of(self, run: str, entry: Entry) -> dict[str, Any]:
        """Return the facts of one checkpoint."""
        row: dict[str, Any] = {"seq": entry.seq, "step": entry.step, "damage": shown(entry.damage or entry.refused)}
        if entry.info is None:
            return row
        row |= _facts_of(entry.info)
        if entry.points:
            steps = [point.step for point in entry.points]
            nbytes = sum(point.nbytes for point in entry.points)
            row["points"] = {"count": len(steps), "first": min(steps), "last": max(steps), "nbytes": nbytes}
        name = ManifestName(run, entry.seq, entry.step, entry.info.generation)
        try:
            manifest = self.repository.manifests_of(run).load(name)
        except (CkstoreError, FileNotFoundError) as error:
            row["damage"] = shown(f"its manifest cannot be read: {error}")
            return row
        return row | self._bytes_of(manifest)

    def _bytes_of(self, manifest: Manifest) -> dict[str, Any]:
        new = {bytes(chunk.chunk_id) for chunk in manifest.chunks} - self._seen
        raw_new = sum(chunk.nbytes for chunk in manifest.chunks if bytes(chunk.chunk_id) in new)
        raw = sum(chunk.nbytes for chunk in manifest.chunks)
        whole = delta = 0
        tiers: Counter[str] = Counter()
        for frame in manifest.frames:
            pack = manifest.packs[frame.pack]
            tiers[pack.tier] += frame.frame_nbytes
            self._needed[pack.pack_id, frame.offset] = frame.frame_nbytes
            if bytes(frame.chunk_id) in new:
                whole += 0 if frame.base >= 0 else frame.frame_nbytes
                delta += frame.frame_nbytes if frame.base >= 0 else 0
        self._seen |= new
        for pack in manifest.packs:
            self._pack_sizes.setdefault(pack.tier, {})[pack.pack_id] = pack.nbytes
            self._tier_of[pack.pack_id] = pack.tier
        lost = lost_tensors(manifest)
        return {
            "raw_new": raw_new,
            "raw_reused": raw - raw_new,
            "stored_whole": whole,
            "stored_delta": delta,
            "read": sum(nbytes for tier, nbytes in tiers.items() if tier != LOST_TIER),
            "depths": _depths(manifest),
            "tiers": dict(sorted((shown(tier), nbytes) for tier, nbytes in tiers.items() if tier != LOST_TIER)),
            "groups": _groups(manifest),
            "lost": [shown(path) for path in lost[:LOST_SHOWN_MAX]],
            "lost_count": len(lost),
            "reason": shown(manifest.decisions.reason) if manifest.decisions is not None else "",
        }

    def tiers(self) -> list[dict[str, Any]]:
        """Return packs and bytes by tier, and how many of these bytes checkpoints need."""
        needed: Counter[str] = Counter()
        for (pack_id, _), nbytes in self._needed.items():
            needed[self._tier_of[pack_id]] += nbytes
        return [
            {"name": shown(tier), "packs": len(packs), "nbytes": sum(packs.values()), "needed": needed[tier]}
            for tier, packs in sorted(self._pack_sizes.items())
            if tier != LOST_TIER
        ]


def _facts_of(info: Info) -> dict[str, Any]:
    return {
        "id": info.checkpoint_id[:16],
        "time_ms": info.time_ns // 10**6,
        "parent": info.parent,
        "generation": info.generation,
        "is_archival": info.is_archival,
        "fidelity": shown(info.fidelity),
        # JSON has no NaN and infinity. They are written as text and not plotted.
        "metrics": {shown(name): _number(value) for name, value in sorted(info.metrics.items())},
        "tags": [shown(tag) for tag in info.tags],
        "state": info.bytes_state,
        "stored": info.bytes_stored,
        "written": info.bytes_written,
        "tensors": info.tensor_count,
        "chunks_new": info.chunks_new,
        "chunks_reused": info.chunks_reused,
        "depth": info.depth_max,
    }


def _number(value: float) -> float | str:
    return value if value - value == 0 else str(value)


def _depths(manifest: Manifest) -> list[int]:
    """Return the number of chunks of the state at each chain depth."""
    own = {chunk.chunk_id for chunk in manifest.chunks}
    counts = Counter(frame.depth for frame in manifest.frames if frame.chunk_id in own)
    return [counts[depth] for depth in range(max(counts, default=0) + 1)]


def _groups(manifest: Manifest) -> list[list[Any]]:
    """Return name, tensor count, plain bytes and stored bytes of each group. Shared bytes count once."""
    stored = {bytes(frame.chunk_id): frame.frame_nbytes for frame in manifest.frames}
    plain_of: dict[int, int] = {}
    for storage in manifest.storages:
        for piece in storage.pieces:
            plain_of[piece.chunk] = plain_of.get(piece.chunk, 0) + piece.nbytes
    tensors: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    stored_of: dict[str, float] = {}
    done: set[int] = set()
    for path, leaf in leaves_of(manifest.tree):
        if not isinstance(leaf, TensorNode):
            continue
        key = group_of(path)
        tensors[key] += 1
        storage_index = manifest.tensors[leaf.tensor].storage
        if storage_index in done:
            continue
        done.add(storage_index)
        for piece in manifest.storages[storage_index].pieces:
            plain[key] += piece.nbytes
            chunk = manifest.chunks[piece.chunk]
            stored_of[key] = (
                stored_of.get(key, 0.0) + stored[bytes(chunk.chunk_id)] * piece.nbytes / plain_of[piece.chunk]
            )
    return [[shown(key), count, plain[key], round(stored_of.get(key, 0.0))] for key, count in tensors.items()]


def _gc_facts(report: GcReport) -> dict[str, Any]:
    plan = report.plan
    return {
        "stop": shown(plan.stop),
        "dropped": report.dropped_count,
        "moved": plan.moved_nbytes,
        "rewritten": plan.rewritten_nbytes,
        "waiting": plan.waiting_nbytes,
        "freed": report.freed_nbytes,
        "young": plan.young_nbytes,
        "free_ms": None if plan.free_ns is None else plan.free_ns // 10**6,
        "rules": next((shown(run.rules) for run in report.runs if run.rules), ""),
        "runs": {
            run.run: {
                "blocked": shown(run.blocked),
                "notes": _texts(run.notes),
                "verdicts": {str(verdict.seq): [verdict.is_kept, _texts(verdict.reasons)] for verdict in run.verdicts},
            }
            for run in report.runs
        },
    }


def _texts(texts: Iterable[str]) -> list[str]:
    return [shown(text) for text in texts]


_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def page_of(data: dict[str, Any]) -> str:
    """Return the page that shows this data."""
    style, script = _read("page.css"), _read("page.js")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _read("page.html")
    for mark, content in (
        ("%POLICY%", policy),
        ("%STYLE%", style),
        ("%SCRIPT%", script),
        ("%DATA%", embedded(data)),
    ):
        before, found, after = page.partition(mark)
        assert found, "the page has a place for everything"
        page = before + content + after
    return page


def embedded(data: dict[str, Any]) -> str:
    """Return JSON that an HTML parser takes for plain text."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _source(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def report_page(repository: Repository, on_progress: Callable[[int, int], None] | None) -> str:
    """Return the report on a store as an HTML page; see ``Store.report``."""
    gc: GcReport | None = None
    problem = ""
    try:
        gc = collect_store(repository, stored_policy(repository), runs=None, limits=GcLimits(), dry_run=True)
    except CkstoreError as error:
        # The plan of a collection is only one section of the page.
        problem = str(error)
    return page_of(gather(repository, gc, problem, on_progress))
