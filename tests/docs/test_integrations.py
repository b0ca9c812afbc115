"""The loops of docs/integrations: each runs as it stands there, and is right."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from documents import Document
from loops import COMMON, apart, rows, trained
from ranks.harness import Ranks
from textbook import data, mean_loss, network, relative, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

ACCELERATE = Document("docs/integrations/accelerate.md")
PYTORCH = Document("docs/integrations/pytorch.md")
FSDP2 = Document("docs/integrations/fsdp2.md")
TRANSFORMERS = Document("docs/integrations/transformers.md")


def test_accelerate_has_the_bits_of_the_loop_before_in_full_windows():
    """Two full windows of 16 change nothing for an Accelerate loop but one line."""
    before, after = network(torch.float32), network(torch.float32)
    loader = DataLoader(rows(64), 2)
    ACCELERATE.run("Before", 0, **accelerate_names(before, loader))
    found = ACCELERATE.run("After", 0, **accelerate_names(after, loader))
    assert same(before, after)
    assert found["accum"].updates == 2


def test_accelerate_closes_the_tail_as_a_mean_over_what_is_there():
    """20 micro-batches: the second window is a mean over 4, not 4 of 16."""
    model, loader = network(torch.float32), DataLoader(rows(40), 2)
    expected = trained(model, list(loader), 16, clip=1.0)
    found = ACCELERATE.run("After", 0, **accelerate_names(model, loader))
    assert apart(model, expected) < 1e-6
    assert found["scheduler"].scheduler.last_epoch == 2


def accelerate_names(model, loader):
    optimizer = SGD(model.parameters(), lr=0.1)
    return COMMON | {
        "Accelerator": partial(Accelerator, cpu=True),
        "model": model,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 100),
        "loader": loader,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    """Processes on this machine."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@contextmanager
def double_precision() -> Iterator[None]:
    """As the ranks have it, so that the same weights are drawn."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ddp_rank(rank):
    """What each rank runs: the loop for plain DDP, on its share of 22 samples."""
    sampler = DistributedSampler(rows(dtype=torch.float64), 2, rank, shuffle=False)
    names = PYTORCH.run(
        "After",
        0,
        **COMMON,
        DistributedDataParallel=DistributedDataParallel,
        model=network(),
        loader=DataLoader(rows(dtype=torch.float64), 2, sampler=sampler),
        epochs=2,
    )
    accum = names["accum"]
    found = [p.detach() for p in names["model"].parameters()]
    answer = found, accum.updates, accum.syncs, accum.last.weight
    del names
    return answer


def test_plain_ddp_on_two_ranks_is_one_large_batch(ranks):
    """Both ranks end with the weights that AdamW has on the large batches of both together."""
    with double_precision():
        reference = network()
    optimizer = torch.optim.AdamW(reference.parameters())
    samples = rows(dtype=torch.float64)
    per_rank = [samples[0::2], samples[1::2]]  # what DistributedSampler deals out
    for _ in range(2):
        for begin, end in ((0, 8), (8, 11)):  # 4 micro-batches of 2, then the tail: 2 and 1
            window = [sample for own in per_rank for sample in own[begin:end]]
            whole = tuple(torch.stack(side) for side in zip(*window, strict=True))
            optimizer.zero_grad()
            mean_loss(reference, whole).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
    for found, updates, syncs, weight in ranks.run(2, ddp_rank):
        assert relative(found, list(reference.parameters())) < 1e-12
        assert (updates, syncs, weight) == (4, 4, 6.0)


def ddp_bits_rank(rank):
    """What each rank runs: the loops before and after, on two full windows."""
    samples = rows(32, torch.float64)
    sampler = DistributedSampler(samples, 2, rank, shuffle=False)
    names = COMMON | {
        "DistributedDataParallel": DistributedDataParallel,
        "loader": DataLoader(samples, 2, sampler=sampler),
        "epochs": 1,
    }
    before = PYTORCH.run("Before", 0, model=network(), nullcontext=nullcontext, **names)["model"]
    after = PYTORCH.run("After", 0, model=network(), **names)["model"]
    return same(before, after), relative(list(network().parameters()), list(after.parameters()))


def test_plain_ddp_has_the_bits_of_the_loop_before_in_full_windows(ranks):
    """On both ranks."""
    for equal, moved in ranks.run(2, ddp_bits_rank):
        assert equal
        assert moved > 0


class Blocks(nn.Module):
    """A model of blocks, as the loop for fully_shard expects it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def sharded_rank(rank):
    """What each rank runs: the loop for fully_shard, on micro-batches of its own."""
    names = FSDP2.run("After", 0, **COMMON, model=Blocks(), loader=data([2] * 12, seed=rank))
    found = [p.full_tensor().detach() for p in names["model"].parameters()]
    answer = found, names["accum"].updates
    del names
    gc.collect()
    return answer


def sharded_before_rank(rank):
    """The same of the loop before, for two full windows."""
    loader = data([2] * 16, seed=rank)
    before = FSDP2.run("Before", 0, **COMMON, model=Blocks(), loader=loader)["model"]
    after = FSDP2.run("After", 0, **COMMON, model=Blocks(), loader=loader)["model"]
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    answer = [relative([a.full_tensor().detach()], [b.full_tensor().detach()]) for a, b in pairs]
    del before, after
    gc.collect()
    return answer


def test_fully_shard_agrees_with_the_loop_before_in_full_windows(ranks):
    """Which reduces once in a window, where the shown one reduces in each micro-batch."""
    for answer in ranks.run(2, sharded_before_rank):
        assert max(answer) < 1e-9  # AdamW's first step: g / |g|


def test_fully_shard_on_two_ranks_is_one_large_batch(ranks):
    """Both ranks end with the weights that AdamW has on the large batches of both together."""
    with double_precision():
        reference = Blocks()
    optimizer = torch.optim.AdamW(reference.parameters())
    per_rank = [data([2] * 12, seed=rank) for rank in (0, 1)]
    for begin, end in ((0, 8), (8, 12)):
        window = [item for own in per_rank for item in own[begin:end]]
        whole = tuple(torch.cat(side) for side in zip(*window, strict=True))
        optimizer.zero_grad()
        mean_loss(reference, whole).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    for found, updates in ranks.run(2, sharded_rank):
        assert relative(found, list(reference.parameters())) < 1e-9  # AdamW's first step: g / |g|
        assert updates == 2


class CausalModel(nn.Module):
    """Behaves as the causal models of transformers: shifts its labels, and returns its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Sequential(nn.Embedding(7, 8), nn.Tanh(), nn.Linear(8, 7))

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits, loss = self.body(input_ids), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def texts():
    """8 micro-batches of 2 texts of uneven length, padded; one has no target at all."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(8):
        ids = torch.randint(7, (2, 9), generator=generator)
        mask = torch.arange(9) < torch.tensor([[1 + number], [9 - number]])
        labels = ids.masked_fill(~mask, -100) if number != 5 else torch.full_like(ids, -100)
        found.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return found


def trained_on_texts(smoothing, clip):
    """Plain torch on the mean over all targets of each window of 4 micro-batches."""
    model = CausalModel()
    optimizer = SGD(model.parameters(), lr=0.5)
    for begin in (0, 4):
        window = texts()[begin : begin + 4]
        ids, labels = (torch.cat([item[k] for item in window]) for k in ("input_ids", "labels"))
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        targets = labels[:, 1:].flatten()
        F.cross_entropy(logits, targets, label_smoothing=smoothing).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def test_transformers_with_accelerate_train_on_the_mean_over_all_target_tokens():
    """With the model's own loss, in an Accelerate loop."""
    model = CausalModel()
    optimizer = SGD(model.parameters(), lr=0.5)
    accelerator = Accelerator(cpu=True)
    order = ("model", "optimizer", "scheduler", "loader")
    parts = (model, optimizer, StepLR(optimizer, 100), DataLoader(texts(), batch_size=None))
    names = COMMON | dict(zip(order, accelerator.prepare(*parts), strict=True))
    found = TRANSFORMERS.run("A loop with Accelerate", 0, accelerator=accelerator, **names)
    assert found["accum"].updates == 2
    assert apart(model, trained_on_texts(0.0, None)) < 1e-6


def test_transformers_in_a_plain_loop_train_on_the_mean_over_all_target_tokens():
    """With another loss, computed from the model's logits."""
    model = CausalModel()
    names = COMMON | {"optimizer": SGD(model.parameters(), lr=0.5), "loader": texts()}
    found = TRANSFORMERS.run("A plain loop with your own loss", 0, model=model, **names)
    assert found["accum"].updates == 2
    assert apart(model, trained_on_texts(0.1, 1.0)) < 1e-6
