"""Protects points against changes that torch does not count: the next commit must store the whole state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckstore.journal import owned_memory
from ckstore.journal.owned_memory import OwnedMemory, Sampler
from ckstore.journal.recorder import StepRecorder, owned_tensors


def tensors():
    torch.manual_seed(0)
    shapes = [(), (1,), (3, 5), (300, 70), (2, 3, 4, 5), (40_000,), (0, 3)]
    found = [torch.randn(shape) for shape in shapes] + [torch.randn(9).to(torch.bfloat16), torch.tensor(3.0)]
    found[4] = found[4].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(each) for each in found]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.data.mul_(0.5),
        lambda tensor: tensor.data.clamp_(-0.01, 0.01),
        lambda tensor: tensor.data.neg_(),
    ],
    ids=["multiplied", "clamped", "negated"],
)
def test_uncounted_change_of_a_tensor_is_noticed_once(number, change):
    owned, found = OwnedMemory(), tensors()
    assert not owned.note(found)
    assert not owned.note(found)
    version = found[number]._version
    change(found[number])
    assert found[number]._version == version, "torch has not counted it"
    assert owned.note(found)
    assert not owned.note(found)


def test_counted_change_and_new_memory_are_noticed():
    owned, found = OwnedMemory(), tensors()
    owned.note(found)
    with torch.no_grad():
        found[3][299, 69] = 7
    assert owned.note(found)
    found[3].data = found[3].data.clone()
    assert owned.note(found)
    assert owned.note(found[:-1])
    assert owned.tensor_count == len(found) - 1


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 63, 64, 1000, 8 * 8192, 8 * 8192 + 5, 10_000_001])
@pytest.mark.parametrize("count_max", [1, 7, 8192])
def test_words_are_inside_of_their_tensor_and_spread_over_it(nbytes, count_max):
    rows = owned_memory._rows_of(4096, nbytes, count_max)
    begins, ends = rows[:, 0].astype(int) - 4096, (rows[:, 0] + rows[:, 2]).astype(int) - 4096
    assert begins.min() >= 0
    assert ends.max() <= nbytes
    assert 1 <= len(rows) <= count_max
    assert len(set(begins)) == len(rows)
    assert np.diff(np.append(begins, nbytes)).max() <= 2 * max(8, nbytes / len(rows)) + 8


def test_tensors_on_devices_and_views_with_gaps_are_not_read():
    strided = torch.zeros(4, 4)[:, ::2]
    assert not OwnedMemory().note([torch.zeros(3, device="meta"), strided])
    assert len(owned_memory._table_of([torch.zeros(3, device="meta"), strided])) == 0


@pytest.mark.parametrize("before_step", [True, False], ids=["before the next step", "before the commit"])
def test_recorder_does_not_explain_uncounted_changes(before_step):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    recorder = StepRecorder()
    recorder.attach(optimizer)

    def train():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    recorder.take()
    train()
    assert recorder.take()[1] is None
    train()
    model.weight.data.mul_(0.5)
    if before_step:
        train()
    assert "changed outside of a step" in recorder.take()[1]
    train()
    optimizer.state[model.weight]["exp_avg"].data.zero_()
    assert "changed outside of a step" in recorder.take()[1]
    assert len(owned_tensors(optimizer)) == 8


def grown(shape, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape)


GRADIENTS = {
    "matrix": grown((300, 71)),
    "small rows": grown((1000, 3)).to(torch.bfloat16),
    "transposed": grown((40, 30)).t(),
    "channels_last": grown((8, 3, 5, 5)).to(memory_format=torch.channels_last),
    "scalar": grown(()),
    "part of a buffer": grown((1000,))[7:107].view(10, 10),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_uncounted_changes_of_gradients_are_noticed(name):
    gradients = [each.clone() if each.is_contiguous() else each for each in GRADIENTS.values()]
    sampler = Sampler()
    sampler.sample(gradients)
    index = list(GRADIENTS).index(name)
    changed, kept = gradients[index], gradients[index].clone()
    for change in (changed.data.zero_, changed.data.neg_, lambda: changed.data.clamp_(-0.01, 0.01)):
        sample = sampler.sample(gradients)
        change()
        assert not sample.is_unchanged
        changed.data.copy_(kept)
        assert sample.is_unchanged


@pytest.mark.parametrize("name", ["matrix", "small rows", "channels_last"])
def test_an_uncounted_change_of_any_row_of_a_gradient_is_noticed(name):
    gradient = GRADIENTS[name].clone()
    sample = Sampler().sample([*GRADIENTS.values(), gradient])
    for row in range(len(gradient)):
        kept = gradient[row].clone()
        gradient.data[row].neg_()
        assert not sample.is_unchanged, row
        gradient.data[row].copy_(kept)
    assert sample.is_unchanged


def test_of_very_many_rows_a_sample_is_read_and_released_memory_is_not():
    gradient = torch.zeros(20_000, 3)
    sample = Sampler().sample([gradient, torch.zeros(4, 4)[:, ::2], torch.zeros(3, device="meta")])
    assert len(sample.table) == 2048
    gradient.data[: len(gradient) // 100].fill_(1)
    assert not sample.is_unchanged
    gradient.data.zero_()
    gradient.untyped_storage().resize_(0)
    assert not sample.is_unchanged


@pytest.mark.parametrize("part", ["dense", "sparse"])
@pytest.mark.parametrize("when", ["in the step", "before the commit"])
def test_recorder_does_not_explain_uncounted_changes_of_gradients(part, when):
    class Old(torch.optim.SGD):
        """Changes gradients as many optimizers did when torch had ``Variable``."""

        def step(self, closure=None):
            super().step()
            if when == "in the step":
                change()

    table, head = torch.nn.Embedding(30, 4, sparse=True), torch.nn.Linear(4, 4)
    optimizer = Old([*head.parameters(), *table.parameters()], 0.1)
    recorder = StepRecorder()
    recorder.attach(optimizer)

    def change():
        (head.weight.grad if part == "dense" else table.weight.grad._values()).data.mul_(2)

    head(table(torch.tensor([1, 2, 2]))).sum().backward()
    optimizer.step()
    if when == "before the commit":
        change()
    assert "a gradient was" in recorder.take()[1]
