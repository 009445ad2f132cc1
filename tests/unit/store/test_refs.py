"""Protects references: every form finds the right checkpoint, and a wrong one lists what exists."""

from __future__ import annotations

import math

import pytest

import ckstore
from ckstore.errors import NotFoundError, UsageError
from support.memory_files import names_of

STEPS = [10, 20, 30, 20]
LOSSES = [3.0, 1.0, 2.0, 1.0]


@pytest.fixture
def run(store):
    """A run of four entries. Step 20 occurs twice, and the tag ``good`` is on the first of them."""
    for number, (step, loss) in enumerate(zip(STEPS, LOSSES, strict=True)):
        store.commit({"n": number}, step, metrics={"loss": loss, "acc": -loss})
    store.tag("seq:1", "good")
    return store


@pytest.mark.parametrize(
    ("reference", "seq"),
    [
        (10, 0),
        (30, 2),
        (20, 3),
        ("20", 3),
        ("latest", 3),
        ("seq:0", 0),
        ("seq:1", 1),
        ("seq:0001", 1),
        ("good", 1),
        ("best:loss", 3),
        ("best:loss:min", 3),
        ("best:loss:max", 0),
        ("best:acc", 3),
        ("best:acc:min", 0),
        ("best:acc:max", 3),
    ],
)
def test_reference_finds_its_checkpoint(run, reference, seq):
    assert run.info(reference).seq == seq
    assert run.restore(reference) == {"n": seq}


def test_id_prefix_finds_its_checkpoint(run):
    for entry in run.log():
        assert run.info(f"id:{entry.checkpoint_id}").seq == entry.seq
        assert run.info(f"id:{entry.checkpoint_id[:16]}").seq == entry.seq


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        (25, "nearest steps: 10, 20, 30"),
        (-1, "no checkpoint of step -1"),
        ("25", "no checkpoint of step 25"),
        ("seq:9", "no checkpoint with seq 9"),
        ("bad", "no tag 'bad'"),
        ("id:0123456789abcdef", "id begins with 0123456789abcdef"),
        ("best:speed", "recorded metrics: acc, loss"),
    ],
)
def test_unknown_reference_lists_what_exists(run, reference, says):
    with pytest.raises(NotFoundError) as caught:
        run.info(reference)
    assert says.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    "reference",
    [
        True, None, 1.5, b"good", [], "", "seq:", "seq:x", "seq:-1", "seq:1:2", "id:", "id:abc", "id:XYZ0", "id:ABCD",
        "best:", "best:loss:most", "best:loss:min:x", "tag:good", "../good", "a/b", "good\n",
        "ä", "seq:²",
        "٣", "9" * 5000, "-" + "9" * 5000, "seq:" + "9" * 5000,
    ],
)  # fmt: skip
def test_invalid_reference_is_refused(run, reference):
    with pytest.raises(UsageError):
        run.info(reference)


def test_ambiguous_id_prefix_is_refused(run, monkeypatch):
    # Make the ids of two entries begin alike, by faking their headers.
    from ckstore.store import refs

    real = refs.headers_newest_first

    def alike(manifests):
        from dataclasses import replace

        return [replace(header, checkpoint_id=b"\xab" * 31 + bytes([header.seq])) for header in real(manifests)]

    monkeypatch.setattr(refs, "headers_newest_first", alike)
    with pytest.raises(UsageError, match="4 checkpoint ids begin with abab"):
        run.info("id:abab")
    assert run.info("id:" + "ab" * 31 + "02").seq == 2


def test_best_takes_the_newest_of_equals(run):
    assert run.info("best:loss").seq == 3
    assert run.info("best:loss:max").seq == 0
    run.commit({"n": 4}, 40, metrics={"loss": 3.0})
    assert run.info("best:loss:max").seq == 4


def test_best_ignores_nan_and_missing_metrics(store):
    store.commit({"n": 0}, 0, metrics={"loss": 2.0})
    store.commit({"n": 1}, 1, metrics={"loss": math.nan})
    store.commit({"n": 2}, 2)
    assert store.info("best:loss").seq == 0
    assert store.info("best:loss:max").seq == 0
    store.commit({"n": 3}, 3, metrics={"loss": -math.inf})
    assert store.info("best:loss").seq == 3


def test_best_of_nan_alone_is_not_found(store):
    store.commit({"n": 1}, 1, metrics={"loss": math.nan})
    with pytest.raises(NotFoundError, match="is NaN in every checkpoint") as caught:
        store.info("best:loss")
    assert "recorded metrics" not in str(caught.value).lower()


def test_best_without_any_metric_says_how_to_record_one(store):
    store.commit({"n": 1}, 1)
    with pytest.raises(NotFoundError, match="pass metrics= to commit"):
        store.info("best:loss")


def test_digits_are_a_step_not_a_tag(run):
    with pytest.raises(UsageError):
        run.tag(10, "42")
    with pytest.raises(UsageError):
        run.tag(10, "latest")


@pytest.mark.parametrize("name", ["latest", "12", "a b", "../a", "a/b", "", "-x", 5, None])
def test_tags_that_look_like_references_are_refused(run, name):
    before = run.tags()
    with pytest.raises(UsageError):
        run.tag(10, name)
    with pytest.raises(UsageError):
        run.commit({"n": 9}, 9, tags=[name])
    assert run.tags() == before
    assert run.latest().step == 20


def test_tag_of_missing_checkpoint_is_reported(run, backend):
    (path,) = names_of(backend, "manifests/main/00000001-")
    backend.unlink(path)
    with pytest.raises(NotFoundError, match="tag 'good' points to seq 1"):
        run.info("good")


@pytest.mark.parametrize("reference", ["latest", 3, "seq:0", "best:loss", "id:abcd"])
def test_empty_run_has_no_references(store, reference):
    with pytest.raises(NotFoundError):
        store.info(reference)


def test_references_do_not_cross_runs(run, backend):
    with ckstore.open(backend, run="other") as other:
        with pytest.raises(NotFoundError, match="run 'other' has no checkpoint"):
            other.info(10)
        assert other.log() == []
        assert other.tags() == {}
