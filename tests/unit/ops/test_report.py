"""Protects the HTML report: one self-contained file, correct values, and names that cannot inject markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import ckstore
from ckstore.ops.inspect.report import embedded, page_of
from support.browser import Browser, find_browser
from support.journaled_runs import JournaledRun

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"alert(1)\">\u2028${1}`'\"&amp;"
POLICY = ckstore.Policy(threads=1)

needs_browser = pytest.mark.skipif(find_browser() is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store with a history, hostile names, a tag, a second run, and one damaged manifest."""
    path = tmp_path_factory.mktemp("report") / "store"
    source = np.random.default_rng(0)
    weights = source.standard_normal(90_000).astype(np.float32)
    still = source.standard_normal(70_000)
    with ckstore.open(path, policy=POLICY) as store:
        for step in range(0, 12):
            weights += source.standard_normal(90_000).astype(np.float32) * np.float32(1e-4)
            state = {
                "model": {"weights": weights.copy(), EVIL: np.arange(step, step + 9)},
                "optimizer": {"state": {0: {"exp_avg": weights * np.float32(0.1)}}},
                "still": still,
            }
            metrics = {"loss": 3.0 / (step + 1), "<b>acc": step / 12, "nan": float("nan")}
            store.commit(state, step * 100, metrics=metrics, tags=["best"] if step == 7 else [])
    with ckstore.open(path, run="other", policy=POLICY) as store:
        store.commit({"a": still}, 5)
    torn = next(path.glob("manifests/main/00000003-*"))
    torn.write_bytes(torn.read_bytes()[:-7])
    return path


@pytest.fixture(scope="module")
def page(folder):
    with ckstore.open(folder, create=False) as store:
        return store.report()


class Elements(HTMLParser):
    """Every tag of a page with its attributes, and the content of its scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.styles, self._in = [], [], [], None

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in = tag
        if tag == "script":
            self.scripts.append((dict(attributes), []))
        if tag == "style":
            self.styles.append([])

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, content):
        if self._in == "script":
            self.scripts[-1][1].append(content)
        if self._in == "style":
            self.styles[-1].append(content)


def elements(page):
    found = Elements()
    found.feed(page)
    return found


def data_of(page):
    found = elements(page)
    text = next("".join(parts) for attributes, parts in found.scripts if attributes.get("id") == "data")
    return json.loads(text)


def test_page_loads_nothing_external(page):
    found = elements(page)
    for tag, attributes in found.tags:
        assert not {"src", "srcset", "style", "data", "action", "ping"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert attributes.get("href", "#").startswith("#"), tag
        assert tag not in {"link", "iframe", "object", "embed", "base", "img", "form"}, tag
    assert "url(" not in page
    assert "@import" not in page
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_csp_digests_match_style_and_script(page):
    found = elements(page)
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    script = next("".join(parts) for attributes, parts in found.scripts if "type" not in attributes)
    for content in (script, "".join(found.styles[0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(found.scripts) == 2


def test_hostile_names_stay_data(page):
    assert EVIL not in page
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert not set("<>&\u2028") & set(text)
    assert json.loads(embedded({"a": EVIL})) == {"a": EVIL}


def test_numbers_match_the_store(folder, page):
    data = data_of(page)
    rows = {row["seq"]: row for row in next(run for run in data["runs"] if run["name"] == "main")["entries"]}
    with ckstore.open(folder, create=False) as store:
        info, contents = store.info("seq:7"), store.contents("seq:7")
    row = rows[7]
    assert (row["state"], row["written"], row["depth"], row["tags"]) == (
        info.bytes_state, info.bytes_written, info.depth_max, ["best"],
    )  # fmt: skip
    assert row["raw_new"] + row["raw_reused"] == info.bytes_state
    # For ``still``, nothing is new after the first commit.
    assert row["raw_reused"] >= 70_000 * 8
    assert row["stored_whole"] + row["stored_delta"] <= info.bytes_written
    assert sum(group[2] for group in row["groups"]) == info.bytes_state
    assert sum(group[3] for group in row["groups"]) == pytest.approx(
        sum(tensor.stored_nbytes or 0 for tensor in contents.groups), abs=4
    )
    assert {group[0] for group in row["groups"]} == {"model", "optimizer.state.*.exp_avg", "still"}
    assert sum(row["depths"]) == info.chunk_count
    assert rows[3]["damage"]
    packs = list(folder.glob("packs/*/*.pack"))
    assert data["tiers"][0]["packs"] in (len(packs), len(packs) - 1)


def test_page_shows_the_gc_plan(page):
    gc = data_of(page)["gc"]
    assert gc["runs"]["main"]["blocked"]
    assert all(kept for kept, _ in gc["runs"]["main"]["verdicts"].values())


def test_report_of_an_empty_store_can_be_made(tmp_path):
    with ckstore.open(tmp_path / "empty") as store:
        data = data_of(store.report())
    assert (data["runs"], data["tiers"]) == ([], [])


@pytest.fixture(scope="module")
def journaled_page(tmp_path_factory):
    """A report on a run with two keyframes, and points after the first one; and the bytes of its journal."""
    run = JournaledRun(tmp_path_factory.mktemp("report") / "store")
    run.segment(1200, *range(1201, 1250))
    run.segment(1250)
    page = run.store.report()
    nbytes = sum(run.repository.backend.stat(name.path).nbytes for name in run.segments())
    run.store.close()
    return page, nbytes


def test_report_counts_points_and_bytes_of_journals(journaled_page):
    page, nbytes = journaled_page
    data = data_of(page)
    assert data["journals"] == [{"segments": 2, "nbytes": nbytes}]
    newest, oldest = data["runs"][0]["entries"]
    assert "points" not in newest
    points = oldest["points"]
    assert (points["count"], points["first"], points["last"]) == (49, 1201, 1249)
    assert 49 * 4096 <= points["nbytes"] < nbytes


def test_report_changes_nothing(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with ckstore.open(folder, create=False) as store:
        store.report()
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as opened:
        yield opened


@pytest.fixture
def browser_page(browser, page, tmp_path):
    """The page in a browser."""
    file = tmp_path / "report.html"
    file.write_text(page)
    browser.prefer("light")
    browser.open(file.as_uri())
    return browser


@needs_browser
def test_browser_shows_the_page_without_errors(browser_page, tmp_path):
    assert browser_page.ask("document.title").startswith("ckstore report")
    assert browser_page.ask("document.querySelectorAll('#plot .hit').length") == 12
    assert browser_page.ask("document.querySelectorAll('#table tbody tr').length") == 12
    assert browser_page.ask("document.querySelector('.tile.lead b').textContent").endswith("\N{MULTIPLICATION SIGN}")
    browser_page.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 30_000
    assert browser_page.complaints == []
    assert [url for url in browser_page.requests if not url.startswith("file:///")] == []
    assert len(browser_page.requests) == 1


@needs_browser
def test_page_shows_points_compactly(browser, journaled_page, tmp_path):
    file = tmp_path / "journaled.html"
    file.write_text(journaled_page[0])
    browser.prefer("light")
    browser.open(file.as_uri())
    cells = browser.ask("[...document.querySelectorAll('#table tbody tr td:first-child')].map((td) => td.textContent)")
    assert cells == ["1 250", "1 200 +49"]
    browser.click("#table tr[data-seq='0'] button")
    assert "49 points of the journal, steps 1 201 to 1 249" in browser.ask(
        "document.querySelector('#selected').textContent"
    )
    assert "in journals, all runs" in browser.ask("document.querySelector('#tiles').textContent")
    assert browser.complaints == []


@needs_browser
def test_page_works_with_the_mouse(browser_page):
    assert "1 100" in browser_page.ask("document.querySelector('#selected dd').textContent")
    browser_page.click("[data-seq='7'].hit")
    assert "700 (seq 7)" in browser_page.ask("document.querySelector('#selected dd').textContent")
    assert "best" in browser_page.ask("document.querySelector('#selected').textContent")
    assert browser_page.ask("document.querySelector('#table tr[aria-current=true]').dataset.seq") == "7"
    browser_page.click("#table tr[data-seq='2'] button")
    assert "200 (seq 2)" in browser_page.ask("document.querySelector('#selected dd').textContent")
    browser_page.click("[data-seq='3'].hit")
    assert "damaged" in browser_page.ask("document.querySelector('#selected').textContent")
    browser_page.click("[data-sort=written]")
    assert browser_page.ask("document.querySelector('th[aria-sort=descending]').textContent").startswith("written")
    browser_page.click("#filter")
    browser_page.type("best")
    assert browser_page.ask("[...document.querySelectorAll('#table tbody tr')].map((row) => row.dataset.seq)") == ["7"]
    browser_page.click("#runs button[aria-pressed=false]")
    assert browser_page.ask("document.querySelector('#runs [aria-pressed=true]').textContent") == "other"
    assert "5 (seq 0)" in browser_page.ask("document.querySelector('#selected dd').textContent")
    assert browser_page.complaints == []


@needs_browser
def test_page_works_with_the_keyboard(browser_page):
    browser_page.ask("document.body.focus()")
    names = []
    for _ in range(8):
        browser_page.press("Tab")
        names.append(browser_page.ask("document.activeElement.id || document.activeElement.textContent"))
    assert names[0] == "Skip to the table of checkpoints"
    assert {"theme", "metric", "plot"} <= set(names)
    browser_page.ask("document.getElementById('plot').focus()")
    for key, seq in (("ArrowLeft", 10), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", 11)):
        browser_page.press(key)
        assert f"(seq {seq})" in browser_page.ask("document.querySelector('#selected dd').textContent"), key
    browser_page.ask("document.querySelector('[data-sort=depth]').focus()")
    browser_page.press("Enter")
    assert browser_page.ask("document.activeElement.dataset.sort") == "depth"
    assert browser_page.complaints == []


@needs_browser
def test_hostile_names_are_shown_as_text(browser_page):
    browser_page.click("[data-seq='7'].hit")
    assert browser_page.ask("document.title").startswith("ckstore report")
    assert browser_page.ask("document.querySelectorAll('img, b b, main script').length") == 0
    assert "<b>acc" in browser_page.ask("document.getElementById('metric').textContent")
    assert browser_page.ask("document.querySelector('#selected').textContent").count("<b>acc") == 1


CONTRASTS = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = rgb(getComputedStyle(each).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const texts = "h1, h2, p, dt, dd, th button, td, .chip, .tile b, .tile span, #legend li, button";
  return [...document.querySelectorAll(texts)]
    .filter((each) => each.offsetParent && each.textContent.trim() && !each.closest("[aria-current]"))
    .map((each) => {
      const [ink, paper] = [light(rgb(getComputedStyle(each).color)), light(ground(each))];
      const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      return [contrast, each.tagName + " " + each.className + " " + each.textContent.slice(0, 30)];
    });
})()"""
"""Compute the WCAG contrast of every text on the page against its background."""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast_in_light_and_dark(browser_page, scheme):
    browser_page.prefer(scheme)
    contrasts = browser_page.ask(CONTRASTS)
    assert len(contrasts) > 60
    assert [words for contrast, words in contrasts if contrast < 4.5] == []


@needs_browser
def test_theme_button_overrides_the_system(browser_page):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser_page.ask(ground)
    browser_page.click("#theme")
    assert browser_page.ask(ground) == light
    browser_page.click("#theme")
    assert browser_page.ask(ground) != light
    browser_page.prefer("dark")
    assert browser_page.ask(ground) != light


@needs_browser
@pytest.mark.parametrize("width", [360, 700, 1600])
def test_page_fits_every_width(browser_page, width):
    browser_page.resize(width, 900)
    assert browser_page.ask("document.documentElement.scrollWidth") <= width
    browser_page.resize(1280, 1600)


@needs_browser
def test_thousands_of_commits_are_drawn_quickly(browser, tmp_path):
    entries = [
        {
            "seq": seq, "step": seq * 10, "damage": "", "id": "ab", "time_ms": 1_700_000_000_000 + seq, "parent": None,
            "generation": 0, "is_archival": False, "fidelity": "exact", "metrics": {"loss": 1 / (seq + 1)}, "tags": [],
            "state": 10**9, "stored": 10**8, "written": 10**8, "tensors": 300, "chunks_new": 1, "chunks_reused": 1,
            "depth": seq % 5, "raw_new": 10**9, "raw_reused": 0, "stored_whole": 10**8, "stored_delta": 0, "read": 1,
            "depths": [1], "tiers": {"local": 1}, "groups": [["model", 300, 10**9, 10**8]], "lost": [], "lost_count": 0,
            "reason": "",
        }
        for seq in reversed(range(2000))
    ]  # fmt: skip
    data = {
        "store": "x", "made_ms": 1, "runs": [{"name": "main", "entries": entries}], "tiers": [], "gc": None,
        "gc_problem": "not checked",
    }  # fmt: skip
    file = tmp_path / "large.html"
    file.write_text(page_of(data))
    browser.open(file.as_uri())
    assert browser.ask("document.querySelectorAll('#plot .hit').length") == 2000
    assert browser.ask("performance.now()") < 10_000
    assert browser.complaints == []
