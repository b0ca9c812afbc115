"""The classes of docs/integrations/transformers.md: before, after, and for a subclass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from documents import Document

pytest.importorskip("transformers")

from integrations.test_transformers import Small, apart, arguments, logged, plain, texts
from transformers import Trainer

PAGE = Document("docs/integrations/transformers.md")


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_trainer_after_is_right_where_the_one_before_is_not(tmp_path: Path) -> None:
    """A model that takes no number of items, rows of uneven length, a tail."""
    rows = texts(22)
    expected, losses, _ = plain(Small(), rows, False)
    names = {"Trainer": Trainer, "args": arguments(tmp_path), "rows": rows}
    before = PAGE.run("Trainer", 0, model=Small(), **names)
    after = PAGE.run("Trainer", 1, model=Small(), **names)
    assert apart(before["trainer"].model, expected) > 1e-2
    assert apart(after["trainer"].model, expected) <= 1e-13
    assert logged(after["trainer"], "loss") == pytest.approx(losses, rel=1e-6)


def test_the_mixin_comes_first(tmp_path: Path) -> None:
    """So that its methods are found before those of the trainer."""
    names = PAGE.run("Trainer", 2, TheirTrainer=Trainer)
    rows = texts(8)
    trainer = names["MyTrainer"](Small(), arguments(tmp_path), train_dataset=rows)
    trainer.train()
    assert trainer.accum.updates == 2
