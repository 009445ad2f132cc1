"""Protects what users see of results: one line with units in a terminal, and tables without markup of others."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import numpy as np
import pytest

import ckstore
from ckstore.display import html_table, size

HOSTILE = "<img src=x onerror=alert(1)>&\"'\x1b[31m\n"


class Cells(HTMLParser):
    """Collects the tags and texts of a page as a browser reads them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert not attrs

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "<b>store", run="r1") as store:
        for step in range(3):
            store.commit(
                {"w": np.full(1 << 18, step, "f4")}, step, metrics={"loss": 0.5 - step / 10}, tags=[f"t{step}"]
            )
        yield store


def hostile(info):
    return dataclasses.replace(info, run=HOSTILE, tags=(HOSTILE,), metrics={HOSTILE: 1.0}, fidelity=HOSTILE)


def test_info_and_receipt_are_one_line_with_units(store):
    receipt = store.commit({"w": np.zeros(1 << 18, "f4")}, 7)
    assert repr(receipt).startswith("<ckstore.Receipt: step 7, seq 3, 1.00 MiB stored as ")
    shown = repr(store.info(1))
    assert shown.startswith("<ckstore.Info: step 1, seq 1, run r1, 20")
    assert shown.endswith(" UTC, 1.00 MiB, loss=0.4, tags t1>")
    for text in (shown, repr(receipt), repr(hostile(store.info(1)))):
        assert text.isprintable()
    assert max(len(shown), len(repr(receipt))) < 120


def test_store_says_where_it_is_and_whether_it_is_closed(store, tmp_path):
    assert repr(store) == f"<ckstore.Store {str(tmp_path / '<b>store')!r}, run 'r1'>"
    store.close()
    assert repr(store).endswith("run 'r1', closed>")


def test_settings_show_only_what_was_changed():
    assert repr(ckstore.Policy()) == "Policy()"
    policy = ckstore.Policy(compression="best", fidelity=ckstore.Residual.near(max_abs=0.1))
    assert repr(policy) == "Policy(compression='best', fidelity=Residual.near(max_abs=0.1))"
    assert repr(ckstore.Retention(keep_last=3, keep_tag="a")) == "Retention(keep_last=3, keep_tag=('a',))"
    assert repr(ckstore.DemotePolicy(keep_every=5)) == "DemotePolicy(keep_every=5)"
    assert repr(ckstore.Residual(name="mine", keyframe_every=5)) == "Residual(name='mine', keyframe_every=5)"


@pytest.mark.parametrize(
    "settings",
    [
        ckstore.Policy(threads=2, fidelity="small"),
        ckstore.Retention(keep_last=3, keep_best=("loss:2", "speed:1:max"), time_zone="+02:00"),
        ckstore.Residual.small(rules=(("head.*", "exact"),)),
        ckstore.DemotePolicy(fidelity=ckstore.Residual.small()),
        ckstore.RepackPolicy(keyframes=2),
    ],
)
def test_repr_of_settings_makes_them_again(settings):
    assert eval(repr(settings), vars(ckstore) | {name: getattr(ckstore, name) for name in ckstore.__all__}) == settings


def test_log_is_a_list_that_notebooks_show_as_a_table(store):
    log = store.log()
    assert isinstance(log, list)
    assert log == list(log)
    assert json.dumps([1, *log], default=lambda info: info.step) == "[1, 2, 1, 0]"
    page = Cells(log[:2]._repr_html_())
    assert page.texts[0] == "run r1: 2 checkpoints"
    assert {"t2", "t1", "loss=0.4", "1.00 MiB"} <= set(page.texts)
    assert "t0" not in page.texts


def test_notebook_shows_the_newest_of_a_store(store):
    page = Cells(store._repr_html_())
    assert page.texts[0].endswith("<b>store, run r1: 3 checkpoints")
    assert page.tags == {"table", "caption", "thead", "tr", "th", "tbody", "td"}
    for step in range(3, 12):
        store.commit({"w": np.zeros(4)}, step)
    page = Cells(store._repr_html_())
    assert page.texts[0].endswith("12 checkpoints; the newest 10")
    assert "t1" not in page.texts


def test_notebook_shows_damage_of_a_store_and_raises_nothing(store, tmp_path):
    newest = max((tmp_path / "<b>store" / "manifests" / "r1").iterdir())
    newest.chmod(0o600)
    newest.write_bytes(b"no manifest")
    assert any("manifest" in text for text in Cells(store._repr_html_()).texts)
    store.close()
    assert "closed" in Cells(store._repr_html_()).texts[0]


def test_text_of_others_is_never_markup(store):
    info = hostile(store.info(1))
    for page in (info._repr_html_(), type(store.log())([info], title=HOSTILE)._repr_html_()):
        found = Cells(page)
        assert found.tags <= {"table", "caption", "thead", "tr", "th", "tbody", "td"}
        shown = "<img src=x onerror=alert(1)>&\"'?[31m?"
        assert shown in found.texts
        assert f"{shown}=1" in found.texts
    assert Cells(html_table(HOSTILE, (HOSTILE,), ((HOSTILE,),))).tags == {
        "table",
        "caption",
        "thead",
        "tr",
        "th",
        "tbody",
        "td",
    }


def test_sizes_have_three_digits():
    assert [size(n) for n in (0, 999, 1000, 1 << 20, 1023 << 20, 5 << 60)] == [
        "0 B", "999 B", "0.98 KiB", "1.00 MiB", "1.00 GiB", "5120 PiB",
    ]  # fmt: skip


def test_reports_are_one_line_however_much_they_hold(store, tmp_path):
    for step in range(9, 29):
        store.commit({f"w{index}": np.full(1 << 12, step + index, "f4") for index in range(30)}, step)
    found = [store.verify(), store.contents(28), store.diff(27, 28), store.stats(28), store.usage()]
    found += [store.push(str(tmp_path / "attic")), store.gc({"keep_last": 2}, dry_run=True), store.gc({"keep_last": 2})]
    for report in found:
        assert repr(report).startswith(f"<ckstore.{type(report).__name__}: ")
        assert repr(report).isprintable()
        assert len(repr(report)) < 500
    assert "tensors=30 items" in repr(found[1])
    assert "bytes_read=960 KiB" in repr(found[2])
