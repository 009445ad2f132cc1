"""Protects trainers on a GPU, with real savers: each checkpoint is correct, and the guard check has no false alarms."""

from __future__ import annotations

import pytest
import torch

import ckstore

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")


@needs_gpu
@pytest.mark.parametrize("is_on_a_stream", [False, True])
def test_gpu_trainer_commits_each_step(tmp_path, is_on_a_stream):
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    wanted = {}
    stream = torch.cuda.Stream() if is_on_a_stream else torch.cuda.current_stream()
    with ckstore.open(tmp_path / "store") as store, torch.cuda.stream(stream):
        store.attach(optimizer)
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(64, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            store.commit_async({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)
            wanted[step] = [parameter.detach().clone() for parameter in model.state_dict().values()]
        store.wait()
        for step, values in wanted.items():
            found = store.restore(step)["model"].values()
            assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, values, strict=True)), step


@needs_gpu
@pytest.mark.parametrize("is_changed", [False, True])
def test_guard_check_finds_only_the_changed_gpu_tensor(tmp_path, is_changed):
    model = torch.nn.Linear(2048, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with ckstore.open(tmp_path / "store", policy=ckstore.Policy(debug_guard=True)) as store:
        store.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
            wanted = model.weight.detach().clone()
            pending = store.commit_async({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)
            if is_changed:
                model.weight.data[5, 7] += 1
            optimizer.step()
            if is_changed:
                with pytest.raises(ckstore.CorruptError, match=r"model\.weight"):
                    pending.result()
            else:
                assert pending.result().step == step
                assert torch.equal(store.restore(step)["model"]["weight"].cpu(), wanted.cpu())
