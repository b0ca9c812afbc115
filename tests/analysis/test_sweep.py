"""What the sweep promises: rows that add up, counted reductions, a file, a model left alone."""

import dataclasses
import json
import math
import time

import pytest
import torch
from torch import nn

from accumplug.analysis.bench import Clock, PeakMemory, noise_between
from accumplug.analysis.curve import Curve, CurveRow
from accumplug.analysis.sweep import sweep_effective_batches
from accumplug.analysis.user_target import example
from accumplug.dataloading.batch_tree import cut
from accumplug.noise.scale import NoiseEstimate

CRITERION = nn.CrossEntropyLoss()


def small(items=32, size=4):
    target = example(items=items, width=16)
    return target.model, cut(target.batch, [size] * (items // size))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One small sweep: the model before and after, the curve, and where it was written."""
    folder = tmp_path_factory.mktemp("sweep")
    model, micro_batches = small()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    curve = sweep_effective_batches(
        model, micro_batches, CRITERION, accum_steps=(4, 1, 2), num_steps=10, output_dir=folder
    )
    return model, before, curve, folder


def test_the_rows_add_up(swept):
    """Effective batch, rate, share and parts of the time agree with each other."""
    _, _, curve, _ = swept
    assert [row.accum_steps for row in curve.rows] == [1, 2, 4]
    assert [row.updates for row in curve.rows] == [10, 5, 3]
    for row in curve.rows:
        assert (row.micro_batch, row.world_size) == (4, 1)
        assert row.effective_batch == 4 * row.accum_steps
        rate = row.effective_batch / (row.median_step_ms / 1e3)
        assert row.samples_per_sec == pytest.approx(rate)
        assert row.share_of_limit == pytest.approx(row.samples_per_sec / row.limit_samples_per_sec)
        assert row.forward_backward_ms + row.rest_ms == pytest.approx(row.median_step_ms)
        assert min(row.forward_backward_ms, row.rest_ms) > 0
        assert row.peak_memory_mib > 1
        assert row.avg_loss == pytest.approx(math.log(10), abs=0.7), "10 classes, hardly trained"


def test_a_window_of_any_size_has_one_reduction(swept):
    """Counted in a communication hook."""
    _, _, curve, _ = swept
    assert [row.sync_calls for row in curve.rows] == [1, 1, 1]


def test_the_file_holds_the_rows_under_its_schema(swept):
    """accum-curve.v1 with the promised fields; JSON that any reader takes (no Infinity)."""
    _, _, curve, folder = swept
    text = (folder / "accum-curve.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["schema"] == "accum-curve.v1"
    assert found["sentence"] == curve.sentence
    assert found["rows"] == [dataclasses.asdict(row) for row in curve.rows]
    assert found["noise_scale"]["windows"] == 2
    assert "accum_steps micro_batch effective_batch world_size samples_per_sec median_step_ms" in (
        " ".join(found["rows"][0])
    )
    assert {"sync_calls", "avg_loss", "share_of_limit", "peak_memory_mib"} <= set(found["rows"][0])


def test_the_model_is_left_as_it_was(swept):
    """Weights and gradients."""
    model, before, _, _ = swept
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None


class Loose(nn.Module):
    """Has a parameter that no loss reaches, and leaves something behind for the loss."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        self.size = self.used(x).square().mean()
        return self.used(x)


def test_a_model_that_ddp_would_not_take_is_swept_in_a_single_process():
    """Unused parameters and attributes of the model: it has no DDP to fit into."""
    curve = sweep_effective_batches(
        Loose(),
        [torch.ones(2, 6)] * 4,
        lambda model, batch: model(batch).mean() + model.size,
        accum_steps=(1, 2),
        num_steps=2,
        output_dir=None,
    )
    assert [row.sync_calls for row in curve.rows] == [1, 1]
    assert curve.noise is not None


def test_every_row_starts_from_the_same_weights():
    """With a learning rate of 0 the mean losses of all rows are those of the micro-batches."""
    model, micro_batches = small()
    curve = sweep_effective_batches(
        model,
        micro_batches[:1],
        CRITERION,
        accum_steps=(1, 3),
        num_steps=3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        output_dir=None,
    )
    (x, y), *_ = micro_batches
    for row in curve.rows:
        assert row.avg_loss == pytest.approx(float(CRITERION(model(x), y).detach()), rel=1e-5)


def test_no_row_knows_of_the_rows_before_it():
    """Training hard, the row of 3 steps has the losses that it has alone."""

    def row_of_three(accum_steps):
        model, micro_batches = small()
        curve = sweep_effective_batches(
            model,
            micro_batches[:1],
            CRITERION,
            accum_steps=accum_steps,
            num_steps=3,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            output_dir=None,
        )
        return curve.rows[-1].avg_loss

    assert row_of_three((1, 3)) == pytest.approx(row_of_three((3,)), rel=1e-5)


def test_the_limit_is_the_time_of_one_pass():
    """A forward pass of 10 ms and nothing else: windows of 4 come near the limit, 400 items/s."""

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x):
            time.sleep(0.01)
            return self.inner(x)

    curve = sweep_effective_batches(
        Slow(),
        [torch.ones(4, 4)],
        lambda model, batch: model(batch).mean(),
        accum_steps=(4,),
        num_steps=12,
        output_dir=None,
    )
    (row,) = curve.rows
    assert 0.6 < row.share_of_limit < 1.4
    assert 100 < row.limit_samples_per_sec < 400


def test_a_slow_optimizer_shows_in_the_rest_and_is_amortised():
    """A step that sleeps 20 ms costs that much an update: in `rest`, and in the sentence."""

    class Sleepy(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.02)
            return super().step(closure)

    model, micro_batches = small()
    curve = sweep_effective_batches(
        model,
        micro_batches,
        CRITERION,
        accum_steps=(1, 8),
        num_steps=8,
        optimizer=lambda parameters: Sleepy(parameters, lr=0.01),
        output_dir=None,
        noise=False,
    )
    first, last = curve.rows
    assert first.rest_ms >= 20
    assert last.share_of_limit > 2 * first.share_of_limit
    assert curve.noise is None
    cost = float(curve.sentence.split("An update costs ")[1].split(" ms")[0])
    assert cost >= 20


def test_memory_of_a_row_is_its_own():
    """After a large block is freed and the count restarted, the peak is lower again."""
    memory = PeakMemory(torch.device("cpu"))
    if "so far" in memory.meaning:
        pytest.skip("this system can't restart the count")
    memory.restart()
    block = torch.ones(64 * 2**20 // 4)
    high = memory.bytes()
    del block
    memory.restart()
    assert memory.bytes() < high - 32 * 2**20


def test_the_clock_measures_seconds():
    """A sleep of 20 ms lies between two marks."""
    clock = Clock(torch.device("cpu"))
    begin = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds(begin, clock.mark()) < 2


def test_the_noise_between_micro_batches_is_that_of_the_formula():
    """Two windows of 4 micro-batches of 1 item, by hand from the gradients of single items."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    items = torch.randn(8, 1, 3, dtype=torch.float64)
    found = noise_between(model, list(items), lambda model, batch: model(batch).mean())
    gradients = items[:, 0].reshape(2, 4, 3)  # of w . x: x itself
    small = gradients.square().sum(-1).mean(-1)
    big = gradients.mean(1).square().sum(-1)
    gradient_sq = ((4 * big - small) / 3).mean()
    trace = ((small - big) / (1 - 1 / 4)).mean()
    assert found.gradient_sq == pytest.approx(float(gradient_sq), rel=1e-6)
    assert found.trace == pytest.approx(float(trace), rel=1e-6)
    assert noise_between(model, list(items[:3]), lambda m, b: m(b).mean()) is None


def row(steps, share, step_ms=10.0):
    """A row of 8 items per micro-batch with a given share of the limit."""
    return CurveRow(
        steps, 8, 8 * steps, 1, 100.0 * share, step_ms, 9.0, 1.0, 100.0, share, 5, 1, 2.0, 300.0
    )


def test_the_sentence_says_where_it_saturates_and_what_an_update_costs():
    """First row: 10 ms, half of it forward and backward, so 5 ms an update, one micro-batch."""
    curve = Curve((row(1, 0.5), row(8, 0.96), row(16, 0.98)), "cpu", "resident")
    assert "reach 96% of the limit (100 per second) at an effective batch of 64" in curve.sentence
    assert "An update costs 5 ms" in curve.sentence
    assert "as much as 1 micro-batches of 8" in curve.sentence
    dear = Curve((row(1, 0.01, step_ms=2000.0),), "cpu", "resident").sentence
    assert "costs 1,980 ms besides" in dear
    assert "as much as 99 micro-batches of 8" in dear
    rising = Curve((row(1, 0.5), row(8, 0.8)), "cpu", "resident")
    assert "still rise at an effective batch of 64" in rising.sentence
    noise = NoiseEstimate(1000.0, 800.0, 1200.0, 1.0, 1000.0, 9)
    known = dataclasses.replace(curve, noise=noise)
    assert "a batch of 64 items is below it" in known.sentence


@pytest.mark.parametrize("shares", [(0.5, 1.63, 0.9), (0.5, 0.96, 0.8), (0.5, 1.3)])
def test_times_that_scatter_are_said_to(shares):
    """Faster than the limit, or slower with a larger batch: no answer is read from that."""
    curve = Curve(tuple(row(4**n, share) for n, share in enumerate(shares)), "cpu", "resident")
    assert curve.sentence.startswith("The times scatter too much to say where")
    assert "--num-steps" in curve.sentence
    assert "reach" not in curve.sentence
    assert "An update costs" in curve.sentence


def test_the_table_has_a_line_for_each_row():
    """What is read on the terminal holds the numbers of the rows."""
    head, *lines = Curve((row(1, 0.5), row(8, 0.96)), "cpu", "resident").table().splitlines()
    assert head.split()[:2] == ["steps", "effective"]
    assert lines[1].split()[:4] == ["8", "64", "96", "96%"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batches": []}, r"micro-batches of one size, got sizes \[\]"),
        ({"micro_batches": [torch.ones(2, 784), torch.ones(3, 784)]}, r"got sizes \[2, 3\]"),
        ({"accum_steps": (0, 1)}, r"steps must be at least 1, got \[0, 1\]"),
        ({"accum_steps": ()}, r"steps must be at least 1, got \[\]"),
        ({"num_steps": 0}, "steps must be at least 1"),
    ],
)
def test_what_can_not_be_swept_is_refused(change, message, tmp_path):
    """Each with the numbers that were seen, before anything is measured or written."""
    model, micro_batches = small()
    arguments = {"micro_batches": micro_batches, "output_dir": tmp_path / "new", **change}
    with pytest.raises(ValueError, match=message):
        sweep_effective_batches(model, loss_fn=CRITERION, **arguments)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "model"}, "model must be a torch.nn.Module, got a str"),
        ({"accum_steps": (1, 2.0)}, r"steps must be of type int, got \[1, 2.0\] and 100"),
        ({"num_steps": "10"}, "steps must be of type int, got .* and '10'"),
        ({"loss_fn": "mse"}, "loss_fn must be a function or a criterion of torch"),
    ],
)
def test_wrong_types_are_type_errors(change, message, tmp_path):
    """Each shows what came."""
    model, micro_batches = small()
    arguments = {"model": model, "micro_batches": micro_batches, "loss_fn": CRITERION, **change}
    with pytest.raises(TypeError, match=message):
        sweep_effective_batches(**arguments, output_dir=tmp_path)


def test_a_loss_that_is_nan_is_swept_and_its_file_is_json(tmp_path):
    """Times are times; the loss is null in the file, and no noise scale is known."""
    model, micro_batches = small()
    curve = sweep_effective_batches(
        model,
        micro_batches,
        lambda model, batch: CRITERION(model(batch[0]), batch[1]) * math.nan,
        accum_steps=(1, 2),
        num_steps=2,
        output_dir=tmp_path,
    )
    assert math.isnan(curve.rows[0].avg_loss)
    text = (tmp_path / "accum-curve.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [row["avg_loss"] for row in found["rows"]] == [None, None]
    assert curve.sentence.endswith("it needs more windows, or larger ones.")
    assert curve.draw(tmp_path / "curve.png").stat().st_size > 1000


def test_micro_batches_without_items_are_refused(tmp_path):
    """Zero rows are no micro-batch."""
    model, _ = small()
    empty = (torch.ones(0, 784), torch.ones(0, dtype=torch.long))
    with pytest.raises(ValueError, match="got micro-batches of 0 items"):
        sweep_effective_batches(model, [empty] * 4, CRITERION, output_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()
