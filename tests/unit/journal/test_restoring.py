"""Protects points from the trainer's state to a restored one, in memory: the same bits, or a named difference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckstore.config import Limits
from ckstore.errors import ReplayError, UnsupportedError, UsageError
from ckstore.format.journal import (
    NO_RECORD,
    Segment,
    encode_record_head,
    encode_segment,
    frames_nbytes,
    read_body,
    read_heads,
)
from ckstore.format.points import decode_point
from ckstore.format.records import SegmentRecord
from ckstore.journal.blobs import BlobReader
from ckstore.journal.drafting import draft_point
from ckstore.journal.encoding import PointDraft, PointEncoder
from ckstore.journal.recorder import StepRecorder
from ckstore.journal.restoring import Replay, StoredPoint, paths_of, restore_point
from ckstore.state.capture import capture, loaded_adapters
from ckstore.state.environment import environment_of
from support.format_samples import STORE_ID

LIMITS = Limits()
SEGMENT = Segment(
    STORE_ID,
    bytes(16),
    SegmentRecord(run="main", order=1, after_seq=None, time_ns=1, previous=None, first=1, environment={}),
)
STEPS = 6


class Training:
    """A small run with a buffer, a scheduler and a random state."""

    def __init__(self, make=lambda model: torch.optim.AdamW(model.parameters(), 1e-2)):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.step = 0

    @property
    def state(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def train(self):
        self.model(torch.randn(8, 6)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1


def bits(state):
    captured = capture(state, loaded_adapters())
    return captured.tree, [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]


class Journal:
    """A segment in memory."""

    def __init__(self, training):
        self.training = training
        self.recorder = StepRecorder()
        self.recorder.attach(training.optimizer)
        self.encoder = PointEncoder(LIMITS, "fast")
        self.content = encode_segment(SEGMENT)
        self.previous, self.number, self.before = NO_RECORD, 0, {}
        self.expected = {}

    def point(self, *, has_facts=False, begins_chain=False):
        training = self.training
        steps, problem = self.recorder.take()
        assert problem is None
        captured = capture(training.state, loaded_adapters())
        drafted = draft_point(
            captured,
            () if begins_chain else steps,
            self.recorder.optimizers,
            before=None if begins_chain else self.before,
            metrics={},
            has_facts=has_facts,
            factors=[],
            thread_count=2,
        )
        arrays = [
            np.frombuffer(source.numpy().tobytes() if isinstance(source, torch.Tensor) else bytes(source), np.uint8)
            for source in drafted.sources
        ]
        encoded = self.encoder.encode(PointDraft.decode(drafted.draft.encode()), arrays, thread_count=2)
        self.number += 1
        head, front = encode_record_head(
            number=self.number,
            step=training.step,
            time_ns=1,
            body=encoded.body,
            frames_nbytes=frames_nbytes([frame.header for frame in encoded.frames]),
            previous=self.previous,
            structure=encoded.structure,
        )
        record = front + b"".join(part for frame in encoded.frames for part in frame.parts)
        self.content += record.ljust(head.nbytes, b"\0")
        self.previous, self.before = head.record_id, drafted.checksums
        self.expected[self.number] = bits(training.state)

    def stored(self, **environment):
        content = self.content

        def read(offset, nbytes):
            return content[offset : offset + nbytes]

        found = []
        for placed in read_heads(read, len(content), SEGMENT):
            point = decode_point(read_body(read, placed))
            blobs = BlobReader(read, placed, point.blobs, LIMITS)
            found.append(StoredPoint(placed.head.number, placed.head.step, point, blobs, environment))
        return found


def plain(state):
    """Return a state as a keyframe without ``into`` would be restored."""
    return {
        "model": {name: tensor.clone() for name, tensor in state["model"].state_dict().items()},
        "optimizer": copy_of(state["optimizer"].state_dict()),
        "schedule": copy_of(state["schedule"].state_dict()),
        "random": state["random"].clone(),
        "step": state["step"],
    }


def copy_of(part):
    if isinstance(part, torch.Tensor):
        return part.clone()
    if isinstance(part, dict):
        return {key: copy_of(value) for key, value in part.items()}
    return [copy_of(each) for each in part] if isinstance(part, list) else part


def load(training, keyframe):
    training.model.load_state_dict(keyframe["model"])
    training.optimizer.load_state_dict(copy_of(keyframe["optimizer"]))
    training.schedule.load_state_dict(keyframe["schedule"])
    training.step = keyframe["step"]
    torch.set_rng_state(keyframe["random"])


def run(make=None):
    training = Training() if make is None else Training(make)
    journal = Journal(training)
    training.train()
    journal.point(has_facts=True, begins_chain=True)
    keyframe = plain(training.state)
    for _ in range(STEPS):
        training.train()
        journal.point()
    return training, journal, keyframe


def replay_of(into=None, optimizers=None, **changes):
    options = {"check": "each", "after_step": None, "thread_count": 2}
    return Replay(into=into, optimizers=optimizers, **(options | changes))


def never_read(index):
    raise AssertionError(f"storage {index} of the keyframe was read again")


def restored(replay, first, others, base, *, read_base=never_read):
    made = restore_point(
        replay, first, others, lambda: base, loaded_adapters(), lambda record: lambda: record, read_base
    )
    return made.state


@pytest.mark.parametrize("check", ["each", "last"])
@pytest.mark.parametrize("number", [1, 2, STEPS + 1])
def test_a_point_is_restored_into_live_objects(number, check):
    _, journal, keyframe = run()
    first, *others = journal.stored()
    other = Training()
    load(other, keyframe)
    replay = replay_of(other.state, [other.optimizer], check=check)
    state = restored(replay, first, others[: number - 1], other.state)
    other.step = state["step"]
    torch.set_rng_state(state["random"])
    assert bits(other.state) == journal.expected[number]


def test_the_first_record_of_a_chain_stores_nothing_of_the_state():
    _, journal, _ = run()
    first, second, *_ = journal.stored()
    assert not first.point.blobs
    assert {each.source for each in first.point.storages} == {"steps", "before"}
    assert "blob" in {each.source for each in second.point.storages}, "the random state has changed"


@pytest.mark.parametrize("number", [1, 2])
def test_what_the_keyframe_has_is_read_again_if_it_was_changed_while_loading(number):
    _, journal, keyframe = run()
    first, *others = journal.stored()
    (index,) = (index for index, path in enumerate(paths_of(first.point)) if path == "random")
    random, read = keyframe["random"].numpy().tobytes(), []

    def read_base(which):
        read.append(which)
        return random

    keyframe["random"] = torch.zeros_like(keyframe["random"])
    state = restored(replay_of(), first, others[: number - 1], keyframe, read_base=read_base)
    assert bits(state) == journal.expected[number]
    assert set(read) == {index}


def test_another_keyframe_is_noticed_by_what_no_step_makes():
    _, journal, keyframe = run()
    first, *others = journal.stored()
    keyframe["random"] = torch.zeros_like(keyframe["random"])
    with pytest.raises(ReplayError, match="random has other bytes than the run had before the first") as caught:
        restored(replay_of(), first, others, keyframe, read_base=lambda _: keyframe["random"].numpy().tobytes())
    assert caught.value.number == 1, "a reader takes the next keyframe"


@pytest.mark.parametrize("number", [1, STEPS + 1])
def test_a_point_is_restored_without_live_objects(number):
    _, journal, keyframe = run()
    first, *others = journal.stored()
    state = restored(replay_of(), first, others[: number - 1], keyframe)
    tree, storages = bits(state)
    expected_tree, expected = journal.expected[number]
    assert storages == expected
    assert tree == expected_tree


def test_training_goes_on_as_if_it_had_never_stopped():
    training, journal, keyframe = run()
    first, *others = journal.stored()
    other = Training()
    load(other, keyframe)
    state = restored(replay_of(other.state, [other.optimizer]), first, others[:2], other.state)
    other.step = state["step"]
    torch.set_rng_state(state["random"])
    while other.step < training.step:
        other.train()
    assert bits(other.state) == journal.expected[STEPS + 1]


def test_what_did_not_change_is_not_stored_again():
    _, journal, _ = run()
    first, second, *_ = journal.stored()
    sources = [storage.source for storage in second.point.storages]
    assert {storage.source for storage in first.point.storages} == {"steps", "before"}
    assert "before" not in sources or sources.count("before") < sources.count("steps")
    quiet = Training()
    journal = Journal(quiet)
    quiet.train()
    journal.point(has_facts=True)
    journal.point()
    assert all(storage.source != "blob" for storage in journal.stored()[1].point.storages)


def test_another_result_names_the_tensor_the_step_and_both_environments():
    _, journal, keyframe = run()
    first, *others = journal.stored(**environment_of([journal.training.optimizer]) | {"threads": "64"})
    other = Training()
    load(other, keyframe)
    other.optimizer.param_groups[0]["foreach"] = False
    hook = other.optimizer.register_step_post_hook(lambda *_: other.model[2].bias.data.add_(1e-3))
    replay = replay_of(other.state, [other.optimizer])
    facts = r"threads 64 then, \d+ now; foreach None then, False now"
    with pytest.raises(ReplayError, match=rf"model\.2\.bias has other bytes.*step 2 \({facts}\)"):
        restored(replay, first, others, other.state)
    hook.remove()


def test_a_keyframe_of_another_state_is_noticed_before_the_first_step():
    _, journal, keyframe = run()
    first, *others = journal.stored()
    keyframe["model"]["0.weight"][0, 0] += 1
    with pytest.raises(ReplayError, match="before the first replayed step"):
        restored(replay_of(), first, others, keyframe)


def test_after_step_replays_what_the_loop_updates():
    _, journal, keyframe = run()
    first, *others = journal.stored()
    seen = []
    restored(replay_of(after_step=seen.append), first, others, keyframe)
    assert seen == list(range(2, STEPS + 2))


def test_a_missing_optimizer_is_named():
    _, journal, keyframe = run()
    first, *others = journal.stored()
    other = Training()
    load(other, keyframe)
    with pytest.raises(UsageError, match="0 optimizers here"):
        restored(replay_of(other.state, []), first, others, other.state)


def test_other_classes_need_the_users_optimizer():
    class Own(torch.optim.SGD):
        pass

    _, journal, keyframe = run(lambda model: Own(model.parameters(), 0.1))
    first, *others = journal.stored()
    with pytest.raises(UnsupportedError, match=r"restore\(into=state\)"):
        restored(replay_of(), first, others, keyframe)


def test_a_state_without_the_optimizer_cannot_be_journaled():
    training = Training()
    journal = Journal(training)
    training.train()
    captured = capture({"model": training.model}, loaded_adapters())
    with pytest.raises(UsageError, match="Commit and restore the model and the optimizer together"):
        draft_point(
            captured,
            journal.recorder.take()[0],
            [training.optimizer],
            before={},
            metrics={},
            has_facts=True,
            factors=[],
            thread_count=1,
        )
