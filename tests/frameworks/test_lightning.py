"""Lightning: a resumed run continues bit for bit, whatever the loader, and its files are what Lightning expects."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.integrations.pointers import is_pointer, read_pointer

L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS_PER_EPOCH, EPOCHS = 8, 4


class Noise(Dataset):
    """Samples that are augmented with random numbers of the training process."""

    def __init__(self):
        self.samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.samples[index] + 0.1 * torch.randn(8)


class Model(L.LightningModule):
    """A model with dropout that records its losses by step."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))
        self.losses = {}

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch).pow(2).mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch) - batch).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def trainer_of(folder, *, checkpoints=None, exact=True, epochs=EPOCHS, background=False, **options):
    io = ckstore.lightning.CheckpointIO(folder / "store", background=background)
    saving = ModelCheckpoint(dirpath=folder / "checkpoints", **{"filename": "{step}", **(checkpoints or {})})
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[io],
        callbacks=[saving, *([ckstore.lightning.ExactResume()] if exact else [])],
        **options,
    )


def losses_of(folder, loader_kind, *, resume=None, seed=0, validate=False, workers=0, **options):
    torch.manual_seed(seed)
    model = Model()
    loader = loader_kind(Noise(), batch_size=4, shuffle=True, num_workers=workers)
    validation = {"val_dataloaders": DataLoader(Noise(), batch_size=16)} if validate else {}
    trainer_of(folder, **options).fit(model, loader, ckpt_path=resume, **validation)
    return model.losses


def check_exact(tmp_path, loader_kind, step, **options):
    undisturbed = losses_of(tmp_path / "a", loader_kind, **options)
    pointer = tmp_path / "a" / "checkpoints" / f"step={step}.ckpt"
    resumed = losses_of(tmp_path / "b", loader_kind, resume=pointer, seed=99, **options)
    expected = {number: loss for number, loss in undisturbed.items() if number >= step}
    assert len(expected) == STEPS_PER_EPOCH * EPOCHS - step
    assert resumed == expected


@pytest.fixture
def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed").StatefulDataLoader


ALL = {"save_top_k": -1}


def test_resume_at_the_end_of_an_epoch_is_exact(tmp_path):
    check_exact(tmp_path, DataLoader, 16, checkpoints=ALL)


def test_resume_from_a_validated_epoch_is_exact(tmp_path):
    check_exact(tmp_path, DataLoader, 16, checkpoints={**ALL, "monitor": "val_loss"}, validate=True)


def test_resume_within_an_epoch_is_exact_with_a_stateful_loader(tmp_path, stateful):
    check_exact(tmp_path, stateful, 20, checkpoints={**ALL, "every_n_train_steps": 4}, background=True)


def test_resume_at_the_end_of_an_epoch_is_exact_with_a_stateful_loader(tmp_path, stateful):
    check_exact(tmp_path, stateful, 16, checkpoints=ALL)


def test_resume_within_an_epoch_warns_with_a_plain_loader(tmp_path):
    losses_of(tmp_path / "a", DataLoader, checkpoints={**ALL, "every_n_train_steps": 4}, epochs=3)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        losses_of(tmp_path / "b", DataLoader, resume=tmp_path / "a" / "checkpoints" / "step=20.ckpt")


def test_without_the_callback_losses_differ(tmp_path):
    undisturbed = losses_of(tmp_path / "a", DataLoader, checkpoints=ALL, exact=False)
    pointer = tmp_path / "a" / "checkpoints" / "step=16.ckpt"
    resumed = losses_of(tmp_path / "b", DataLoader, resume=pointer, seed=99, exact=False)
    assert not any(resumed[step] == undisturbed[step] for step in resumed)


def test_all_is_settled_after_training(tmp_path):
    losses_of(tmp_path, DataLoader, checkpoints={"save_top_k": 1, "save_last": True}, background=True)
    files = sorted((tmp_path / "checkpoints").iterdir())
    assert [file.name for file in files] == ["last.ckpt", "step=32.ckpt"]
    assert all(is_pointer(file) and read_pointer(file).seq is not None for file in files)
    with ckstore.open(tmp_path / "store") as store:
        assert [info.step for info in store.log()] == [32, 32]
