"""Protects ``only=``: a path selects itself, and for a view of a long buffer only its part is read."""

import numpy as np
import pytest

import ckstore
from ckstore.errors import NotFoundError
from support.states import difference

torch = pytest.importorskip("torch")

COUNT, LENGTH = 12, 500_000


@pytest.fixture
def store(tmp_path):
    with ckstore.open(tmp_path / "store") as opened:
        yield opened


def read_by(store, **how):
    """Return what is restored, and how many bytes were read."""
    totals = [0]
    state = store.restore(on_progress=lambda done, total: totals.append(total), **how)
    return state, max(totals)


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("blocks[0].w", {"blocks[0]": {"w": 1}}),
        ("blocks[0]", {"blocks[0]": {"w": 1, "b": 2}}),
        ("what?", {"what?": 5}),
        ("*", {"*": 7}),
        (["blocks0.w", "blocks[0].b"], {"blocks[0]": {"b": 2}, "blocks0": {"w": 3}}),
        ("blocks[01].w", {"blocks0": {"w": 3}}),
        ("what*", {"what?": 5, "whats": 6}),
    ],
)
def test_exact_path_selects_itself(store, only, expected):
    state = {"blocks[0]": {"w": 1, "b": 2}, "blocks0": {"w": 3}, "what?": 5, "whats": 6, "*": 7}
    store.commit(state, 0)
    assert store.restore(only=only) == expected


def test_brackets_that_are_not_a_path_are_a_glob(store):
    store.commit({"a1": 1}, 0)
    assert store.restore(only="a[12]") == {"a1": 1}
    with pytest.raises(NotFoundError):
        store.restore(only="a[34]")


@pytest.mark.parametrize("step", [0, 1], ids=["keyframe", "delta"])
@pytest.mark.parametrize("make", [torch.randn, lambda count: np.random.default_rng(1).random(count, "f4")])
def test_only_the_selected_view_of_a_buffer_is_read(store, make, step):
    flat = make(COUNT * LENGTH)
    state = {f"p{index}": flat[index * LENGTH : (index + 1) * LENGTH] for index in range(COUNT)}
    for number in range(step + 1):
        flat += number * 1e-4
        store.commit(state, number)
    back, nbytes = read_by(store, only=["p3", "p7"])
    assert difference(back, {name: state[name] for name in ("p3", "p7")}) is None
    assert nbytes <= 2 * 4 * LENGTH + 4096
    live = {"p3": make(LENGTH)}
    held = live["p3"]
    _, nbytes = read_by(store, only="p3", into=live)
    assert difference(held, state["p3"]) is None
    assert nbytes <= 4 * LENGTH + 4096


def test_overlapping_views_share_memory_again(store):
    flat = torch.arange(1_000_000.0)
    views = {"a": flat[500_001:500_100], "b": flat[500_050:500_200].view(10, 15), "c": flat[::1000], "all": flat}
    store.commit(views, 0)
    back = store.restore(only=["a", "b"])
    back["a"][60] = -1
    assert back["b"][0, 11] == -1
    assert back["a"].untyped_storage().nbytes() < 4096
    assert difference(store.restore(only="c")["c"], flat[::1000]) is None
    assert difference(store.restore(), views) is None


def test_empty_and_odd_width_views_can_be_selected(store):
    raw = np.random.default_rng(2).integers(0, 255, 1_000_003, "u1")
    state = {"raw": raw, "odd": raw[333_333 : 333_333 + 3 * 24].view("V3"), "none": raw[5:5], "back": raw[700_000:1:-7]}
    store.commit(state, 0)
    for name in ("odd", "none", "back"):
        assert difference(store.restore(only=name), {name: state[name]}) is None


def test_only_is_a_glob_or_a_list_of_globs(store):
    store.commit({"a": 1}, 0)
    for only in (5, [], [1], 10**5000):
        with pytest.raises(ckstore.UsageError, match="glob"):
            store.restore(only=only)
