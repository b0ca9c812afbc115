"""The loops of docs/integrations/lightning.md, before and after, in full windows and a tail."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from documents import Document
from loops import COMMON, apart, rows, trained
from textbook import network
from torch.optim import SGD
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer

PAGE = Document("docs/integrations/lightning.md")
pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = {"accelerator": "cpu", "devices": 1}
QUIET = OPTIONS | {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(LightningModule):
    """The network and the loss of the other loops."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return COMMON["loss_fn"](self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def trainer_names(count):
    names = {"Trainer": Trainer, "options": QUIET, "loader": DataLoader(rows(count), 2)}
    return names | {"module": Module(network(torch.float32))}


def test_trainer_is_the_same_in_full_windows():
    """16 micro-batches of 2: 4 updates."""
    before, after = trainer_names(32), trainer_names(32)
    PAGE.run("Trainer", 0, **before)
    found = PAGE.run("Trainer", 1, **after)
    assert found["accum"].accum.updates == 4
    assert apart(before["module"].model, after["module"].model) < 1e-6


def test_trainer_after_closes_the_tail_as_a_mean_over_what_is_there():
    """11 micro-batches: the last window is a mean over 3."""
    expected = trained(network(torch.float32), list(DataLoader(rows(22), 2)), 4, clip=1.0)
    names = trainer_names(22)
    PAGE.run("Trainer", 1, **names)
    assert apart(names["module"].model, expected) < 1e-6


def fabric_names(count):
    model = network(torch.float32)
    names = {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}
    loader = DataLoader(rows(count), 2)
    return COMMON | names | {"loader": loader, "Fabric": Fabric, "options": OPTIONS}


def test_fabric_is_the_same_in_full_windows():
    """And its tail, which the loop before leaves out, is the mean over what is there."""
    names = fabric_names(32)
    PAGE.run("Fabric", 0, **names)
    after = fabric_names(32)
    PAGE.run("Fabric", 1, **after)
    assert apart(names["model"], after["model"]) < 1e-6
    tail = fabric_names(22)
    start, loader = copy.deepcopy(tail["model"]), list(tail["loader"])
    found = PAGE.run("Fabric", 1, **tail)
    assert found["accum"].updates == 3
    assert apart(tail["model"], trained(start, loader, 4, clip=1.0)) < 1e-6
