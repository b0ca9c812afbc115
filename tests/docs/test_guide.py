"""The code of docs/guide.md runs as it stands there, and is right."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from documents import Document
from loops import COMMON, apart, given, trained
from textbook import big_batch, data, mean_loss, network, relative
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from accumplug import Accumulator

GUIDE = Document("docs/guide.md")


def test_the_complete_loop_trains_and_closes_its_tails(capsys):
    """It needs nothing but what it imports: 10 windows in a pass, the last one of 12 samples."""
    accum = GUIDE.run("A complete loop", 0)["accum"]
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert (accum.updates, len(losses)) == (30, 30)
    assert (accum.last.micro_batches, accum.last.weight) == (2, 12)
    assert losses[-1] < losses[0] / 2


class Tokens(Dataset):
    """Rows of token ids whose targets are partly ignored, other numbers in each row."""

    def __init__(self, rows):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randint(5, (rows, 6), generator=generator)
        self.targets = torch.randint(5, (rows, 6), generator=generator)
        for row in range(rows):
            self.targets[row, : row % 6] = -100

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, row):
        return self.inputs[row], self.targets[row]


def token_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def test_token_weights_give_the_mean_over_all_tokens_of_the_window():
    """The window of the shown loop has the gradient of one batch of all rows."""
    model, rows = token_model(), Tokens(12)
    accum = Accumulator(steps=4)
    GUIDE.run("Weights", 0, F=F, accum=accum, model=model, loader=DataLoader(rows, 3))
    targets = rows.targets.flatten()
    loss = F.cross_entropy(model(rows.inputs).flatten(0, 1), targets)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-15)
    assert accum.last.weight == int((targets != -100).sum())


def test_a_second_term_is_a_mean_over_micro_batches():
    """Tokens weigh the first term, and each micro-batch counts alike in the second."""
    model, rows = token_model(), Tokens(12)
    loader = DataLoader(rows, 3)
    GUIDE.run(
        "A second loss term with its own denominator",
        0,
        F=F,
        accum=Accumulator(steps=4),
        model=model,
        loader=loader,
    )
    first = F.cross_entropy(model(rows.inputs).flatten(0, 1), rows.targets.flatten())
    second = sum(0.01 * model(inputs).square().mean() for inputs, _ in loader) / 4
    expected = torch.autograd.grad(first + second, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-15)


def test_parts_of_one_item_are_one_update():
    """Three items of 20 rows, in parts of 8, 8 and 4: the weights of three large batches."""
    batches = data([20, 20, 20])
    names = given(batches)
    expected = trained(names["model"], batches, 1)
    accum = GUIDE.run("One item, several micro-batches", 0, **names)["accum"]
    assert (accum.updates, accum.micro_batches) == (3, 9)
    assert apart(names["model"], expected) < 1e-13


def test_a_window_closes_at_its_token_budget():
    """The windows are those that plain counting gives, and the tail is an update, too."""
    model, rows = token_model(), Tokens(24)
    loader = DataLoader(rows, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    windows, tokens = [0], 0
    for _, targets in loader:
        tokens += int((targets != -100).sum())
        if tokens >= 40:
            windows, tokens = [*windows, 0], 0
    names = {"F": F, "Accumulator": Accumulator, "optimizer": optimizer, "model": model}
    accum = GUIDE.run("Windows with a token budget", 0, loader=loader, **names)["accum"]
    assert accum.updates == len(windows) - (tokens == 0) > 1
    assert accum.last.weight == (tokens or accum.last.weight)


def test_callbacks_run_once_for_a_window(capsys):
    """Two windows: two lines with the loss that plain torch gives, and two moves of the average."""
    names = given(data([4] * 8))
    start = copy.deepcopy(names["model"])
    average = AveragedModel(names["model"])
    accum = Accumulator(steps=4, optimizer=names["optimizer"])
    GUIDE.run("Logging", 0, accum=accum, average=average, **names)
    lines = capsys.readouterr().out.splitlines()
    first = sum(mean_loss(start, batch).item() for batch in names["loader"][:4]) / 4
    assert [line.split()[0] for line in lines] == ["1", "2"]
    assert float(lines[0].split()[1]) == pytest.approx(first, rel=1e-12)
    assert int(average.n_averaged) == 2


def test_a_loop_may_take_its_own_steps():
    """It has the weights of plain torch on one large batch for each window, the tail included."""
    batches = data([4] * 20)
    names, reference = given(batches, momentum=0.9), network()
    accum = GUIDE.run("A loop that takes its own steps", 0, **names)["accum"]
    optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for window in (batches[:16], batches[16:]):
        for parameter, grad in zip(
            reference.parameters(), big_batch(reference, window), strict=True
        ):
            parameter.grad = grad
        optimizer.step()
    pairs = zip(names["model"].parameters(), reference.parameters(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in pairs)
    assert accum.updates == 2


def test_the_noise_scale_says_a_sentence(capsys):
    """The shown loop prints what the estimate means for this effective batch."""
    names = given(data([2] * 64))
    GUIDE.run(
        "Is a larger batch worth it?",
        accum=Accumulator(steps=4, optimizer=names["optimizer"]),
        **names,
    )
    assert capsys.readouterr().out.startswith("Gradient noise scale: ")


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
    GUIDE.run(
        "Several optimizers",
        0,
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
    names = GUIDE.run(
        "Losses that couple samples",
        0,
        **COMMON,
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        loader=batches,
    )
    optimizer = SGD(reference.parameters(), lr=0.1)
    for one, other in batches:
        optimizer.zero_grad()
        loss = names["contrast"](reference(one), reference(other))
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


def test_the_check_on_a_model_passes(capsys):
    """The shown model can be split in halves and unevenly."""
    assert GUIDE.run("A check on your own model", 0, torch=torch, nn=nn)["result"].passed
    assert capsys.readouterr().out
