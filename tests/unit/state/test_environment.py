"""Protects what a failed replay says: the facts of both environments that differ, short enough for a header."""

from __future__ import annotations

import torch

from ckstore.format.journal import Segment, decode_segment, encode_segment
from ckstore.format.records import SegmentRecord
from ckstore.state.environment import differences, environment_of
from support.format_samples import STORE_ID


def optimizer_of(kind=torch.optim.AdamW, **options):
    return kind([torch.nn.Parameter(torch.zeros(2))], 0.1, **options)


def test_each_implementation_and_device_is_named_once():
    optimizers = [optimizer_of(fused=True), optimizer_of(foreach=True), optimizer_of(fused=True)]
    found = environment_of(optimizers)
    assert found["optimizers"] == "torch.optim.adamw.AdamW"
    assert (found["foreach"], found["fused"], found["capturable"]) == ("None, True", "True, None", "False")
    assert found["device"] == "cpu"
    assert found["threads"] == str(torch.get_num_threads())
    assert found["torch"] == torch.__version__


def test_only_facts_that_differ_are_named():
    now = {"torch": "2", "threads": "8"}
    assert differences({"torch": "2", "threads": "4", "host": "a"}, now) == "threads 4 then, 8 now"
    assert differences(now, now) == ""
    assert differences({}, now) == ""


def test_the_facts_of_many_optimizers_fit_into_a_header():
    kinds = [type("Ö" * 200 + str(number), (torch.optim.SGD,), {}) for number in range(50)]
    found = environment_of([optimizer_of(kind) for kind in kinds])
    facts = SegmentRecord(
        run="r" * 64, order=2**62, after_seq=2**62, time_ns=2**62, previous=None, first=1, environment=found
    )
    segment = Segment(STORE_ID, bytes(16), facts)
    assert decode_segment(encode_segment(segment)) == segment


def test_a_flag_that_torch_sets_later_is_no_difference():
    optimizer = optimizer_of(type("Old", (torch.optim.SGD,), {}))
    del optimizer.param_groups[0]["differentiable"]
    then = environment_of([optimizer])
    optimizer.param_groups[0]["differentiable"] = optimizer.defaults["differentiable"] = True
    assert differences(then, environment_of([optimizer])) == ""
