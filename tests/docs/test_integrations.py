"""The loops of README.md beside others: each runs as it stands there, and is right."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from documents import Document
from ranks.harness import Ranks
from textbook import data, mean_loss, network, relative, same, textbook_loop
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from accumplug import Accumulator

README = Document("README.md")
TESTED = {
    ("Accelerate", 0),
    ("Plain DDP", 0),
    ("Mixed precision", 0),
    ("transformers", 0),
    ("transformers", 1),
    ("A GAN", 0),
    ("A contrastive loss", 0),
    ("Lightning Fabric", 0),
}
ROWS = 22
COMMON = {"torch": torch, "F": F, "Accumulator": Accumulator, "loss_fn": F.mse_loss}


def test_every_loop_is_run_by_a_test():
    """There is no block of code in this section without a test."""
    assert README.python(after="## Beside others", before="## Files") == TESTED


def rows(count=ROWS, dtype=torch.float32):
    """Samples one by one, for loaders that make micro-batches of them."""
    return [(x[0], y[0]) for x, y in data([1] * count, dtype)]


def trained(model, batches, steps, clip=None, lr=0.1):
    """A copy of `model` after plain torch's training on one large batch for each window."""
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=lr)
    for begin in range(0, len(batches), steps):
        window = batches[begin : begin + steps]
        whole = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        optimizer.zero_grad()
        mean_loss(model, whole).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def apart(one, other):
    """How far the parameters of two models are from each other, relatively."""
    return relative(list(one.parameters()), list(other.parameters()))


def test_accelerate_has_the_bits_of_the_textbook_loop_in_full_windows():
    """Two full windows of 16 change nothing for an Accelerate loop but one line."""
    reference, model = network(torch.float32), network(torch.float32)
    loader = DataLoader(rows(64), 2)
    optimizer = SGD(reference.parameters(), lr=0.1)
    textbook_loop(reference, loader, 16, optimizer, max_grad_norm=1.0)
    names = accelerate_loop(model, loader)
    assert same(model, reference)
    assert names["accum"].updates == 2


def test_accelerate_closes_the_tail_as_a_mean_over_what_is_there():
    """20 micro-batches: the second window is a mean over 4, not 4 of 16."""
    start = network(torch.float32)
    loader = DataLoader(rows(40), 2)
    expected = trained(start, list(loader), 16, clip=1.0)
    names = accelerate_loop(start, loader)
    assert apart(start, expected) < 1e-6
    assert names["scheduler"].scheduler.last_epoch == 2


def accelerate_loop(model, loader):
    optimizer = SGD(model.parameters(), lr=0.1)
    return README.run(
        "Accelerate",
        **COMMON,
        Accelerator=lambda: Accelerator(cpu=True),
        model=model,
        optimizer=optimizer,
        scheduler=StepLR(optimizer, 100),
        loader=loader,
    )


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
    names = README.run(
        "Plain DDP",
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
    names = README.run("FSDP2", **COMMON, model=Blocks(), loader=data([2] * 12, seed=rank))
    found = [p.full_tensor().detach() for p in names["model"].parameters()]
    answer = found, names["accum"].updates
    del names
    gc.collect()
    return answer


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


def test_mixed_precision_is_the_textbook_of_torch():
    """fp16 on the CPU with a scaler has the bits of the loop that torch's documents show."""
    reference, model = network(torch.float32), network(torch.float32)
    batches = data([3] * 8, torch.float32)
    scaler, optimizer = torch.amp.GradScaler("cpu"), SGD(reference.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches, 1):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(reference(x), y)
        scaler.scale(loss / 4).backward()
        if number % 4 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    names = README.run(
        "Mixed precision",
        **COMMON,
        device=torch.device("cpu"),
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loader=batches,
    )
    assert names["accum"].updates == 2
    assert same(model, reference)


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


@pytest.mark.parametrize("number", [0, 1])
def test_transformers_models_train_on_the_mean_over_all_target_tokens(number):
    """With the model's own loss, and with another one that is computed from its logits."""
    model = CausalModel()
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 100)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": texts()}
    if number == 0:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(texts(), batch_size=None)
        prepared = accelerator.prepare(model, optimizer, scheduler, loader)
        names |= dict(zip(names, prepared, strict=True)) | {"accelerator": accelerator}
    found = README.run("transformers", number, **COMMON, **names)
    expected = trained_on_texts(*((0.0, None) if number == 0 else (0.1, 1.0)))
    assert found["accum"].updates == 2
    assert apart(model, expected) < 1e-6


def test_each_side_of_a_gan_has_the_gradient_of_its_own_window():
    """7 micro-batches of uneven size in windows of 4: both sides train as on the whole windows."""

    def pair():
        torch.manual_seed(8)
        judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        maker = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        return judge.double(), maker.double()

    def noise(*shape):
        return draws(*shape, generator=generator, dtype=torch.float64)

    draws = torch.randn
    reals = [x for x, _ in data([3, 1, 4, 2, 5, 2, 1])]
    judge, maker = pair()
    generator = torch.Generator().manual_seed(9)
    README.run(
        "A GAN",
        torch=SimpleNamespace(randn=noise),
        F=F,
        Accumulator=Accumulator,
        judge=judge,
        maker=maker,
        judge_optimizer=SGD(judge.parameters(), lr=0.5),
        maker_optimizer=SGD(maker.parameters(), lr=0.5),
        loader=reals,
    )
    ref_judge, ref_maker = pair()
    generator = torch.Generator().manual_seed(9)
    drawn = [noise(len(real), 8) for real in reals]
    for begin in (0, 4):
        # The last micro-batch's judge has its update already when the maker's loss is taken.
        sums = {ref_judge: 0.0, ref_maker: 0.0}
        items = sum(map(len, reals[begin : begin + 4]))
        window = list(zip(reals, drawn, strict=True))[begin : begin + 4]
        for place, (real, z) in enumerate(window, 1):
            fake = ref_maker(z)
            loss = F.softplus(-ref_judge(real)).mean() + F.softplus(ref_judge(fake.detach())).mean()
            sums[ref_judge] += len(real) / items * loss
            if place == len(window):
                move(ref_judge, sums[ref_judge])
            sums[ref_maker] += len(real) / items * F.softplus(-ref_judge(fake)).mean()
        move(ref_maker, sums[ref_maker])
    assert apart(judge, ref_judge) < 1e-12
    assert apart(maker, ref_maker) < 1e-12


def move(model, loss):
    """One step of plain gradient descent, into new tensors: other graphs hold the old ones."""
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for (name, parameter), grad in zip(list(model.named_parameters()), grads, strict=True):
        place = model.get_submodule(name.rpartition(".")[0])
        setattr(place, name.rpartition(".")[2], nn.Parameter(parameter.detach() - 0.5 * grad))


def test_a_contrastive_loss_has_the_negatives_of_the_whole_batch():
    """The shown loop trains as plain torch does with all 64 pairs in one graph, a tail included."""
    generator = torch.Generator().manual_seed(10)
    batches = [
        tuple(torch.randn(n, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        for n in (64, 64, 20)
    ]
    model, reference = network(), network()
    names = README.run(
        "A contrastive loss",
        **COMMON,
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loader=batches,
    )
    optimizer = SGD(reference.parameters(), lr=0.1)
    for one, other in batches:
        optimizer.zero_grad()
        loss = names["contrast"](reference(one), reference(other)) / len(one)
        loss.backward()
        optimizer.step()
    assert names["accum"].updates == 3
    assert apart(model, reference) < 1e-12


def test_a_contrastive_loss_of_micro_batches_is_another_loss():
    """What the section says of the plain loop: with in-batch negatives it is no large batch."""
    one, other = (x for x, _ in data([16, 16]))
    model = network()

    def gradient(size):
        parts = zip(one.split(size), other.split(size), strict=True)
        loss = sum(
            F.cross_entropy(model(a) @ model(b).T / 0.1, torch.arange(len(a)), reduction="sum")
            for a, b in parts
        )
        return torch.autograd.grad(loss / 16, list(model.parameters()))

    assert relative(gradient(4), gradient(16)) > 0.1


def test_lightning_fabric_needs_no_change_of_the_loop():
    """The shown loop is Python; where Fabric is installed it trains as plain torch does."""
    assert README.find("Lightning Fabric").code()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Fabric imports
        module = pytest.importorskip("lightning_fabric", reason="Lightning Fabric is not installed")
        start, loader = network(torch.float32), DataLoader(rows(), 2)
        expected = trained(start, list(loader), 4, clip=1.0)
        names = README.run(
            "Lightning Fabric",
            **COMMON,
            Fabric=lambda: module.Fabric(accelerator="cpu", devices=1),
            model=start,
            optimizer=SGD(start.parameters(), lr=0.1),
            loader=loader,
        )
    assert names["accum"].updates == 3
    assert apart(start, expected) < 1e-6
