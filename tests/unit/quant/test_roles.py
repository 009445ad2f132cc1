"""Protects tensors that must stay exact: only a clear place and shape make a tensor a weight or a moment."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.format.many_ranks import World, root_node
from ckstore.format.tree import format_path
from ckstore.quant.roles import pair
from ckstore.state.capture import capture

SHAPES = {"a.weight": (4, 6), "a.bias": (6,), "b.weight": (4, 6), "c.weight": (3, 5)}


def model(shapes=SHAPES, dtype=np.float32):
    return {name: np.ones(shape, dtype) for name, shape in shapes.items()}


def moments(shape, **more):
    two = {"step": np.float32(7), "exp_avg": np.ones(shape, np.float32), "exp_avg_sq": np.ones(shape, np.float32)}
    return {**two, **more}


def adam(names=tuple(SHAPES), *, betas=(0.9, 0.95), groups=None, by_name=False):
    groups = [list(range(len(names)))] if groups is None else groups
    keys = {number: name if by_name else number for number, name in enumerate(names)}
    return {
        "state": {keys[number]: moments(SHAPES[name]) for number, name in enumerate(names)},
        "param_groups": [
            {"lr": 1e-3, "betas": betas, "params": [keys[number] for number in group]} for group in groups
        ],
    }


def roles_in(state):
    """Return the role by path, and each moment's weight by path."""
    captured = capture(state)
    found = pair(captured.tree, captured.tensors)
    name = {index: format_path(path) for index, path in found.paths.items()}
    return (
        {name[index]: role for index, role in found.roles.items()},
        {name[index]: name[weight] for index, weight in found.weight_of.items()},
        found,
    )


def test_a_plain_optimizer_is_paired_by_order_and_shape():
    roles, weight_of, found = roles_in({"model": model(), "optimizer": adam()})
    assert roles["optimizer.state.0.exp_avg"] == "first"
    assert roles["optimizer.state.3.exp_avg_sq"] == "second"
    assert "optimizer.state.0.step" not in roles
    assert roles["model.c.weight"] == "weight"
    assert "model.a.bias" not in roles, "one dimension stays exact"
    assert weight_of["optimizer.state.0.exp_avg"] == "model.a.weight"
    assert weight_of["optimizer.state.2.exp_avg_sq"] == "model.b.weight", "two tensors of a shape are paired in order"
    assert weight_of["optimizer.state.3.exp_avg"] == "model.c.weight"
    assert len(found.second_of) == 4


def test_reordered_groups_are_paired_by_shape():
    # The second and the fourth parameter are in the first group, as with and without weight decay.
    names = ("a.bias", "c.weight", "a.weight", "b.weight")
    _, weight_of, _ = roles_in({"model": model(), "optimizer": adam(names, groups=[[0, 1], [2, 3]])})
    assert weight_of["optimizer.state.1.exp_avg"] == "model.c.weight"
    assert weight_of["optimizer.state.2.exp_avg"] == "model.a.weight"
    assert weight_of["optimizer.state.3.exp_avg"] == "model.b.weight"


def test_names_identify_weights_in_any_order():
    names = ("c.weight", "b.weight", "a.weight")
    state = {"average": model(), "model": {"net": model()}, "optimizer": adam(names, by_name=True)}
    _, weight_of, _ = roles_in(state)
    assert weight_of["optimizer.state.b.weight.exp_avg"] == "average.b.weight", "the shortest path"
    del state["average"]
    _, weight_of, _ = roles_in(state)
    assert weight_of["optimizer.state.b.weight.exp_avg"] == "model.net.b.weight"
    assert weight_of["optimizer.state.a.weight.exp_avg_sq"] == "model.net.a.weight"


def test_moments_without_a_weight_are_still_a_pair():
    roles, weight_of, found = roles_in(adam())
    assert set(roles.values()) == {"first", "second"}
    assert weight_of == {}
    assert len(found.second_of) == 4


def test_model_without_optimizer_is_weights():
    roles, _, _ = roles_in(model())
    assert roles == {"a.weight": "weight", "b.weight": "weight", "c.weight": "weight"}


OTHERS = {
    "SGD": {"momentum_buffer": (4, 6)},
    "Lion": {"exp_avg": (4, 6)},
    "Muon": {"momentum_buffer": (4, 6), "second_momentum": (4, 1)},
    "Adafactor": {"exp_avg_sq_row": (4,), "exp_avg_sq_col": (6,), "exp_avg": (4, 6)},
    "Adafactor of torch": {"row_var": (4, 1), "col_var": (1, 6)},
    "Adafactor of a vector": {"exp_avg_sq": (4, 6), "RMS": ()},
    "Adamax": {"exp_avg": (4, 6), "exp_inf": (4, 6)},
    "Adan": {"exp_avg": (4, 6), "exp_avg_sq": (4, 6), "exp_avg_diff": (4, 6)},
    "SOAP": {"exp_avg": (4, 6), "exp_avg_sq": (4, 6), "Q": (4, 4)},
    "RMSprop": {"square_avg": (4, 6), "momentum_buffer": (4, 6)},
    "8-bit": {"state1": (4, 6), "state2": (4, 6)},
    "moments of two shapes": {"exp_avg": (4, 6), "exp_avg_sq": (4, 1)},
}


@pytest.mark.parametrize("kept", OTHERS.values(), ids=OTHERS)
def test_states_of_other_optimizers_stay_exact(kept):
    entry = {"step": 3, **{name: np.ones(shape, np.float32) for name, shape in kept.items()}}
    optimizer = {"state": {0: entry}, "param_groups": [{"params": [0]}]}
    roles, _, _ = roles_in({"model": model(), "optimizer": optimizer})
    assert {path for path in roles if path.startswith("optimizer")} == set()
    assert roles["model.a.weight"] == "weight"


@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "c8"])
def test_other_dtypes_have_no_role(dtype):
    roles, _, _ = roles_in({"model": model(dtype=dtype)})
    assert roles == {}


@pytest.mark.parametrize(
    "key",
    ["optimizer", "optim_state", "opt", "exp_avg_sq", "momentum", "rng", "lr_scheduler", "loader", "m", "v", "scaler"],
)
def test_excluded_keys_contain_no_weights(key):
    roles, _, _ = roles_in({"model": model(), key: {"x": np.ones((8, 8), np.float32)}})
    assert all(path.startswith("model") for path in roles)
    # Deep inside a model such a name has no special meaning.
    roles, _, _ = roles_in({"model": {"net": {"inner": {"loader.weight": np.ones((8, 8), np.float32)}}}})
    assert roles == {"model.net.inner.loader.weight": "weight"}


@pytest.mark.parametrize(
    ("key", "held"),
    [
        ("muon", {"buf": [(4, 6)]}),
        ("prev_grad", {"a.weight": (4, 6), "b.weight": (4, 6), "c.weight": (3, 5)}),
        ("stats", {"kalman_cov": (4, 6)}),
        ("logits_history", (4, 6)),
        ("lion", {"weights": {"a.weight": (4, 6)}}),
        ("acc_grads", {"model": {"a.weight": (4, 6)}}),
        ("preconditioner", {"L": (4, 4), "R": (6, 6)}),
        ("buffers", [(4, 6), (4, 6), (4, 6)]),
    ],
)
@pytest.mark.parametrize("optimizer", [None, adam(), adam(by_name=True)], ids=["none", "numbered", "named"])
@pytest.mark.parametrize("is_first", [True, False])
def test_unidentified_tensor_is_not_a_weight(key, held, optimizer, is_first):
    def made(part):
        if isinstance(part, dict):
            return {name: made(each) for name, each in part.items()}
        return [made(each) for each in part] if isinstance(part, list) else np.ones(part, np.float32)

    parts = {"model": model(), **({} if optimizer is None else {"optimizer": optimizer})}
    roles, weight_of, _ = roles_in({key: made(held), **parts} if is_first else {**parts, key: made(held)})
    assert not [path for path in roles if not path.startswith(("model", "optimizer"))]
    assert {path for path, role in roles.items() if role == "weight"} == {
        *("model.a.weight", "model.b.weight", "model.c.weight")
    }
    assert all(weight.startswith("model") for weight in weight_of.values())


@pytest.mark.parametrize(
    "state",
    [
        {"net": {"w": (4, 6)}},
        {"trainer": {"generator": {"x": [(4, 6)]}}},
        {"best_model": {"x": (4, 6)}, "sgd": {"x": (4, 6)}},
        {"ema_params": {"x": (4, 6)}, "opt_state": {"x": (4, 6)}},
        {"model_state_dict": {"x": (4, 6)}, "optimizer_state_dict": {"x": (4, 6)}},
        {"w": {"x": (4, 6)}, "m": {"x": (4, 6)}, "v": {"x": (4, 6)}},
        {"model.layers.0.x": (4, 6), "optimizer.layers.0.x": (4, 6)},
        {"x.weight": (4, 6), "x.running_cov": (4, 6)},
        {"lstm.weight_hh_l0": (4, 6), "x": (4, 6)},
    ],
)
def test_containers_and_names_identify_weights(state):
    def made(part):
        if isinstance(part, dict):
            return {name: made(each) for name, each in part.items()}
        return [made(each) for each in part] if isinstance(part, list) else np.ones(part, np.float32)

    roles, _, _ = roles_in(made(state))
    assert list(roles.values()) == ["weight"]
    assert next(iter(roles)).replace("'", "").startswith(next(iter(state)))


def test_unambiguous_owner_of_moments_is_a_weight():
    layers = {"first": model(), "rest": {"x": np.ones((2, 9), np.float32)}}
    for optimizer in (adam(), adam(by_name=True)):
        roles, weight_of, _ = roles_in({**layers, "optimizer": optimizer})
        assert {path for path, role in roles.items() if role == "weight"} == {
            *("first.a.weight", "first.b.weight", "first.c.weight")
        }
        assert len(weight_of) == 6
        # Twice as many tensors of one shape: their weights are ambiguous.
        roles, weight_of, _ = roles_in({"copy": model(), **layers, "optimizer": optimizer})
        assert set(roles.values()) == {"first", "second"}
        assert weight_of == {}


def test_hyperparameters_come_from_the_optimizer():
    optimizer = adam(betas=(0.8, 0.99))
    optimizer["state"][0]["step"] = 7
    optimizer["state"][1]["step"] = np.array(8.0, np.float32)
    _, _, found = roles_in({"model": model(), "optimizer": optimizer})
    plain, tensor, *_ = found.constants.values()
    assert (plain.beta1, plain.beta2, plain.step, plain.step_tensor) == (0.8, 0.99, 7, None)
    assert tensor.step is None
    assert format_path(found.paths[tensor.step_tensor]) == "optimizer.state.1.step"
    for betas in ((0.9,), (0.9, 1.0), (1.0, 0.9), (0.99, 0.9), None, ("a", "b"), (float("nan"), 0.9)):
        _, _, found = roles_in({"model": model(), "optimizer": adam(betas=betas)})
        assert found.constants == {}, betas


def test_unusual_states_have_no_roles():
    for state in (
        None,
        {"state": {}, "param_groups": []},
        {"state": [], "param_groups": {}},
        {"state": {0: 1}, "param_groups": [{"params": 3}, 4]},
        {"optimizer": {"state": {0: {"exp_avg": 1, "exp_avg_sq": 2}}, "param_groups": [{"params": [0]}]}},
    ):
        assert roles_in(state)[0] == {}


def test_shared_tensor_is_not_a_moment_pair():
    same = np.ones((4, 6), np.float32)
    optimizer = {"state": {0: {"exp_avg": same, "exp_avg_sq": same}}, "param_groups": [{"params": [0]}]}
    assert roles_in(optimizer)[0] == {}


def test_a_checkpoint_by_many_ranks_has_the_roles_of_its_state():
    captured = capture({"model": model(), "optimizer": adam()})
    root = root_node(captured.tree, World(2, bytes(16)))
    found = pair(root, captured.tensors)
    assert found == pair(captured.tree, captured.tensors)
    assert set(found.roles.values()) == {"weight", "first", "second"}
