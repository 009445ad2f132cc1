"""Protects what programs read: the keys of every command's JSON, in order, and the headings of its tables.

An added, renamed or removed key or heading fails a test, whatever the records in the code are called.
"""

from __future__ import annotations

import contextlib
import io
import json
import re

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run
from ckstore.cli.parser import COMMANDS
from support.cli_stores import flip_byte, make_store

INFO = (
    "step seq checkpoint_id run time_ns parent origin_id generation is_archival fidelity metrics(loss) tags[] "
    "bytes_state bytes_stored bytes_written tensor_count chunk_count chunks_new chunks_reused depth_max warnings[] "
    "tiers[] form time"
)

JSON = {
    "init": "path is_new",
    "ls": f"path runs[run count entries[{INFO} damage refused points[]] damaged_tags[] refused_tags[] missing]",
    "ls of damage": (
        f"path runs[run count entries[{INFO} damage refused points[]] damaged_tags[name damage] refused_tags[] missing]"
    ),
    "status": f"path max_age_seconds is_stale runs[run count age_seconds newest({INFO})]",
    "du": (
        "path nbytes kinds[kind files nbytes] runs[run count nbytes own_nbytes elsewhere_nbytes] "
        "checkpoints[run seq step nbytes own_nbytes tags[]] tiers[] problem"
    ),
    "du of tiers": (
        "path nbytes kinds[kind files nbytes] runs[run count nbytes own_nbytes elsewhere_nbytes] "
        "checkpoints[run seq step nbytes own_nbytes tags[]] tiers[tier address packs nbytes] problem"
    ),
    "show": (
        f"{INFO} groups[key tensor_count value_count nbytes stored_nbytes] tensors[path library dtype "
        "shape[] nbytes stored_nbytes shares_with] packs[pack_id nbytes used_nbytes frame_count "
        "tier] base_nbytes losses[path role method numbers(clip dead_zone outer_error_max "
        "outer_rank_max outer_step step) bits max_abs rel_rms kept hops spike | path role "
        "method numbers(dead_zone levels_max step) bits max_abs rel_rms kept hops spike | path "
        "role method numbers(log_step outer_error_max outer_rank_max outer_step) bits max_abs "
        "rel_rms kept hops spike]"
    ),
    "show --codec": (
        f"{INFO} base base_seq keyframe_seq reason tensors[path dtype elements nbytes stored_nbytes "
        "mode steps[] depth full_bits previous_bits keyframe_bits stored_bits]"
    ),
    "diff": (
        f"first({INFO}) second({INFO}) is_equal tensors[path status dtype shape[] elements changed_count "
        "relative rms max_abs] values[path status before after] value_count bytes_read"
    ),
    "stats": (
        f"{INFO} base base_seq keyframe_seq reason tensors[path dtype elements nbytes stored_nbytes "
        "mode steps[] depth full_bits previous_bits keyframe_bits stored_bits bound_bits "
        "estimated_full_bits delta_bits] is_exact total(elements nbytes stored_nbytes "
        "stored_bits bound_bits full_bits) groups[key tensor_count modes[] elements nbytes "
        "stored_nbytes stored_bits bound_bits full_bits]"
    ),
    "verify": (
        "path level is_clean checkpoint_count pack_count frame_count bytes_read packs_elsewhere "
        "files_torn copied_ns seconds damage[what where checkpoints[] tensors[]] refused[] "
        "unreachable[] segment_count point_count notes[] replayed"
    ),
    "restore": "seq step checkpoint_id run file nbytes seconds notes()",
    "export": "seq step checkpoint_id run file tensor_count nbytes seconds shared(*) left_out(* note)",
    "export --hf": (
        "seq step checkpoint_id run folder files[] tensor_count nbytes seconds tied(tied) left_out() notes[]"
    ),
    "import --dry-run": (
        "source run is_dry_run bytes_before bytes_stored ratio seconds is_partial left_out(*) "
        "warnings[] checkpoints[name step kinds[] action reason nbytes seq bytes_state "
        "bytes_written metrics() left_out() without_state() warnings[] time_ns is_compared]"
    ),
    "import!": (
        "source run is_dry_run bytes_before bytes_stored ratio seconds is_partial left_out(*) "
        "warnings[] checkpoints[name step kinds[] action reason nbytes seq bytes_state "
        "bytes_written metrics() left_out() without_state() warnings[] time_ns is_compared]"
    ),
    "tag": f"{INFO}",
    "untag!": "run removed",
    "repack --dry-run": (
        "run is_dry_run saving_min packs_before packs_after bytes_written superseded_count "
        "seconds checkpoints[seq step action base_seq reason bytes_state stored_before "
        "stored_after read_before read_after is_done]"
    ),
    "demote --dry-run": (
        "run is_dry_run form fidelity packs_before packs_after bytes_written seconds warnings[] "
        "checkpoints[seq step action reason fidelity bytes_state stored_before stored_after "
        "worst_rel_rms is_done is_final form]"
    ),
    "repair": (
        "path is_dry_run is_clean is_identity_made checkpoints[run seq step action reason "
        "tensors[] is_done] packs(*) packs_rescued[] claims_made[] bytes_copied left[] "
        "packs_elsewhere segments[] seconds"
    ),
    "quarantine": "path is_dry_run manifests(*) packs() left[]",
    "gc --dry-run": (
        "is_dry_run refused runs[run rules blocked notes[] checkpoints[seq step time is_kept "
        "reasons[]]] plan(stop drops[run seq step generation] unfinished[] superseded[] "
        "put_back[] rescues[] moves[] rewrites[pack_id nbytes nbytes_after manifests] purges[] "
        "waiting_nbytes young_nbytes segments[] drafts[] unproven[]) done freed_nbytes later_nbytes "
        "later_time"
    ),
    "push --dry-run": (
        "run tier address is_dry_run bytes_to_push bytes_copied packs_copied points_copied "
        "journal_bytes_copied seconds "
        "checkpoints[seq step action reason packs_nbytes is_done]"
    ),
    "push!": (
        "run tier address is_dry_run bytes_to_push bytes_copied packs_copied points_copied "
        "journal_bytes_copied seconds "
        "checkpoints[seq step action reason packs_nbytes is_done]"
    ),
    "ls of tiers": (
        f"path runs[run count entries[{INFO} damage refused points[]] damaged_tags[] refused_tags[] missing]"
    ),
    "pull --dry-run": (
        "run is_dry_run bytes_to_pull bytes_copied packs_copied points_copied "
        "journal_bytes_copied seconds checkpoints[seq step "
        "tiers[] packs_nbytes is_done problem]"
    ),
    "mirror --dry-run": (
        "address is_dry_run bytes_copied packs_copied points_copied journal_bytes_copied seconds "
        "runs[run checkpoint_count copied_count partial_count kept_count tag_count damaged_count "
        "unreachable_count points_copied]"
    ),
    "mirror!": (
        "address is_dry_run bytes_copied packs_copied points_copied journal_bytes_copied seconds "
        "runs[run checkpoint_count copied_count partial_count kept_count tag_count damaged_count "
        "unreachable_count points_copied]"
    ),
    "delete!": "run deleted[seq step]",
    "gc!": (
        "is_dry_run refused runs[run rules blocked notes[] checkpoints[seq step time is_kept "
        "reasons[]]] plan(stop drops[run seq step generation] unfinished[] superseded[] "
        "put_back[] rescues[] moves[pack_id nbytes] rewrites[pack_id nbytes nbytes_after "
        "manifests] purges[] waiting_nbytes young_nbytes segments[] drafts[] unproven[]) "
        "done(dropped[run seq step generation] spared[] rescued superseded moved_packs moved_nbytes freed_files "
        "freed_nbytes moved_segments moved_segments_nbytes repacked[] repacked_nbytes replaced_manifests "
        "troubles[] drafts intents waits_for[] unproven[] waits() stop) freed_nbytes later_nbytes later_time"
    ),
    "gc --tier": (
        "is_dry_run tier address dropped[run seq step generation] superseded[] packs[pack_id "
        "nbytes] freed_nbytes young_nbytes rewrites[pack_id nbytes packed_nbytes] repacked[] "
        "repacked_nbytes replaced_manifests renewed_manifests troubles[] lists stop "
        "segments[]"
    ),
    "trash ls": (
        "trash[trash_id time packs nbytes manifests[] segments | trash_id time packs nbytes "
        "manifests[run seq step generation kind] segments]"
    ),
    "undelete!": f"run undeleted[{INFO}]",
    "trash restore!": f"packs undeleted[{INFO}] troubles[] superseded exact_again[] segments",
    "trash purge!": "freed_nbytes",
    "rewind!": f"{INFO}",
    "report": "file nbytes seconds",
    "adopt": "path is_original tiers()",
    "doctor": "path findings[topic found verdict]",
    "bench": "path state_nbytes timings[what seconds disk_nbytes]",
    "push --forget!": "forgotten address",
}

LOCATION = "lies in"
"""The heading of the column that names the tiers of a checkpoint."""

HEADINGS = {
    "ls": [
        "seq | step | time (local) | age | state | written | ratio | new/reused | metrics | tags | fidelity | parent",
    ],
    "ls of damage": [
        "seq | step | time (local) | age | state | written | ratio | new/reused | metrics | tags | fidelity | parent",
    ],
    "status": [
        "run | checkpoints | newest step | seq | time (local) | age | state | fidelity",
    ],
    "du": [
        "what | files | size",
        "run | checkpoints | packs here | only this run | in other tiers",
        "run | seq | step | needs | deleting frees | tags",
    ],
    "du of tiers": [
        "what | files | size",
        "run | checkpoints | packs here | only this run | in other tiers",
        "run | seq | step | needs | deleting frees | tags",
        "tier | packs | size | address",
    ],
    "show": [
        "group | tensors | values | bytes | stored | ratio",
        "path | dtype | shape | bytes | stored | shares memory with",
        "path | as | method | bits | rms error | max error | kept | hops | next step",
        "pack | size | used | frames | tier",
    ],
    "show --codec": [
        "path | dtype | mode | codecs | depth | stored | full | previous | keyframe",
    ],
    "diff": [
        "path | status | dtype | shape | changed | relative | max abs",
        "path | status | before | after",
    ],
    "stats": [
        "group | tensors | modes | elements | bytes | stored | bits | order-0 | full",
        "path | dtype | mode | elements | bytes | stored | bits | order-0 | full | delta",
    ],
    "import --dry-run": [
        "step | from | what | files | stored | ratio | metrics | action | why",
    ],
    "repack --dry-run": [
        "seq | step | action | base | stored now | then | read now | then | why",
    ],
    "demote --dry-run": [
        "seq | step | action | fidelity | state | stored now | then | rms error | why",
    ],
    "gc --dry-run": [
        "seq | step | time (local) | why",
    ],
    "push --dry-run": [
        "seq | step | action | packs here | why",
    ],
    "ls of tiers": [
        "seq | step | time (local) | age | state | written | ratio | new/reused | metrics | tags | fidelity | parent "
        f"| {LOCATION}",
    ],
    "pull --dry-run": [
        f"seq | step | {LOCATION} | packs there",
    ],
    "mirror --dry-run": [
        "run | checkpoints | copied | partial | damaged | out of reach | only there | tags",
    ],
    "trash ls": [
        "id | time (local) | packs | size | checkpoints",
    ],
    "doctor": [
        "what | found | verdict",
    ],
    "bench": [
        "what | time | rate of state | on disk | vs plain write",
    ],
}

PATH_OR_ID = re.compile(r"[^a-z_]|^[0-9a-f]{32}$")


def shape_of(document):
    """Return the keys of a document, nested: ``run entries[step seq] packs(*)``; ``*`` is a path or an id."""
    if isinstance(document, dict):
        shapes = [("*" if PATH_OR_ID.search(key) else key) + nested(value) for key, value in document.items()]
        return " ".join(dict.fromkeys(shapes))
    return ""


def nested(value):
    if isinstance(value, dict):
        return f"({shape_of(value)})"
    if isinstance(value, list):
        return f"[{' | '.join(sorted({shape for each in value if (shape := shape_of(each))}))}]"
    return ""


def make_lossy_store(path):
    """Make a store of four checkpoints. The third is lossy, the others are exact."""
    rng = np.random.default_rng(2)
    weights = rng.standard_normal((260, 300))
    with ckstore.open(path) as store:
        for step in range(4):
            weights = weights + rng.standard_normal(weights.shape) * 1e-3
            second = np.exp(rng.standard_normal(weights.shape)).astype(np.float32)
            entry = {"exp_avg": (second / 3).astype(np.float32), "exp_avg_sq": second}
            groups = [{"betas": (0.9, 0.999), "params": [0]}]
            state = {
                "model": {"w": weights.astype(np.float32), "tied": weights, "bias": np.arange(5.0)},
                "optimizer": {"state": {0: entry}, "param_groups": groups},
                "epoch": step,
            }
            state["model"]["twin"] = state["model"]["w"]
            fidelity = ckstore.Residual.near() if step == 2 else "exact"
            store.commit(state, step, metrics={"loss": 1.0}, policy=ckstore.Policy(fidelity=fidelity))
    return path


def make_tiered_store(folder):
    """Make a store whose tier holds a dropped checkpoint, half of whose pack another checkpoint needs."""
    with ckstore.open(folder / "tiered") as store:
        for step in range(4):
            own = np.random.default_rng(step).standard_normal(9000)
            shared = np.arange(9000) if step < 3 else own
            store.commit({"own": own, "shared": shared, "twice": own if step else np.ones(2)}, step)
        store.push(str(folder / "tiered-attic"), keep_local=1, tier="attic")
        store.delete(0)
        store.delete(2)
        store.gc(now=True)
    return folder / "tiered"


def damage(store):
    """Flip a byte in the first commit's pack, tear the second one's manifest, and damage its tag."""
    with ckstore.open(store) as opened:
        pack_id = opened.contents("seq:0").packs[0].pack_id
    flip_byte(next(store.glob(f"packs/*/{pack_id}.pack")), 6000)
    torn = next(store.glob("manifests/main/00000001-*"))
    torn.chmod(0o600)
    torn.write_bytes(torn.read_bytes()[:-3])
    (store / "tags/main/good").write_text("garbage")


def scenes(folder):
    """Yield names and arguments of commands in order. ``!`` marks those that change what later ones see."""
    plain, broken, lossy = (
        make_store(folder / "plain"),
        make_store(folder / "broken"),
        make_lossy_store(folder / "lossy"),
    )
    damage(broken)
    source = folder / "source"
    source.mkdir()
    yield "init", ["init", folder / "new"]
    yield "ls", ["ls", plain, "--run", "main"]
    yield "ls of damage", ["ls", broken, "--run", "main"]
    yield "status", ["status", plain, "--run", "main"]
    yield "du", ["du", plain]
    yield "show", ["show", lossy, "seq:2"]
    yield "show --codec", ["show", lossy, "--codec"]
    yield "diff", ["diff", lossy, "0", "3"]
    yield "stats", ["stats", lossy]
    yield "verify", ["verify", broken]
    yield "restore", ["restore", plain, "-o", folder / "x.npz", "--force"]
    yield "export", ["export", plain, "latest", "-o", folder / "source" / "step_5.safetensors", "--force"]
    yield "export --hf", ["export", plain, "latest", "--hf", folder / "model", "--force"]
    (source / "step_6.h5").write_bytes(b"a file of another library")
    yield "import --dry-run", ["import", folder / "imported", source, "--dry-run"]
    yield "import!", ["import", folder / "imported", source]
    yield "tag", ["tag", plain, "300", "v1"]
    yield "untag!", ["untag", plain, "v1"]
    yield "repack --dry-run", ["repack", lossy, "--dry-run"]
    yield "demote --dry-run", ["demote", lossy, "--keep-newest", "1", "--keep-every", "0", "--dry-run"]
    yield "repair", ["repair", broken]
    yield "quarantine", ["quarantine", broken]
    yield "gc --dry-run", ["gc", lossy, "--keep-last", "2", "--dry-run"]
    yield "push --dry-run", ["push", lossy, folder / "tier", "--keep-local", "2", "--dry-run", "--tier", "attic"]
    yield "push!", ["push", lossy, folder / "tier", "--keep-local", "2", "--tier", "attic"]
    yield "ls of tiers", ["ls", lossy]
    yield "du of tiers", ["du", lossy]
    yield "pull --dry-run", ["pull", lossy, "--dry-run"]
    yield "mirror --dry-run", ["mirror", lossy, folder / "copy", "--dry-run"]
    yield "mirror!", ["mirror", lossy, folder / "copy"]
    yield "delete!", ["delete", lossy, "1", "--yes"]
    yield "gc!", ["gc", lossy, "--keep-last", "1"]
    yield "gc --tier", ["gc", make_tiered_store(folder), "--tier", "attic", "--min-age", "0", "--dry-run"]
    yield "trash ls", ["trash", "ls", lossy]
    yield "undelete!", ["undelete", lossy, "1"]
    with ckstore.open(lossy, create=False) as store:
        trash_ids = [entry.trash_id for entry in store.trash() if entry.pack_count or entry.manifests]
    yield "trash restore!", ["trash", "restore", lossy, *trash_ids]
    yield "trash purge!", ["trash", "purge", lossy, "--all", "--yes"]
    yield "rewind!", ["rewind", plain, "100"]
    yield "report", ["report", plain, "-o", folder / "x.html", "--force"]
    yield "adopt", ["adopt", plain, "--as-original"]
    yield "doctor", ["doctor", plain]
    yield "bench", ["bench", folder, "--size", "16"]
    with ckstore.open(plain, create=False) as store:
        store.push(str(folder / "spare"), keep_local=99, tier="spare")
    yield "push --forget!", ["push", plain, "--forget", "spare"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The output of each scene, as JSON and for people. Scenes that change their store run as JSON only."""

    def printed(arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run([str(argument) for argument in arguments])
        assert code in (0, 3, 12), err.getvalue()
        return out.getvalue()

    found = {}
    for name, arguments in scenes(tmp_path_factory.mktemp("shapes")):
        text = "" if name.endswith("!") else printed(arguments)
        found[name] = json.loads(printed([*arguments, "--json"])), text
    return found


def test_every_command_has_a_scene(outputs):
    assert {name.split()[0].rstrip("!") for name in outputs} == set(COMMANDS)
    assert set(outputs) == set(JSON)


@pytest.mark.parametrize("name", JSON)
def test_json_has_exactly_these_keys(outputs, name):
    assert shape_of(outputs[name][0]) == JSON[name]


@pytest.mark.parametrize("name", HEADINGS)
def test_tables_have_exactly_these_headings(outputs, name):
    lines = [re.sub(r" {2,}", " | ", line.strip()) for line in outputs[name][1].splitlines()]
    assert [line for line in lines if line in HEADINGS[name]] == HEADINGS[name]


def test_delete_lists_checkpoints_before_it_asks(call, store, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda question: False)
    code, out, _ = call("delete", store, 100)
    heading, row = (re.split(" {2,}", line.strip()) for line in out.splitlines()[1:3])
    assert (code, out.splitlines()[0]) == (1, "to be deleted from run main")
    assert heading == ["seq", "step", "time (local)", "state", "metrics", "tags"]
    assert (row[:2], row[3:]) == (["0", "100"], ["197 KiB", "loss=3", "-"])
