"""What the noise scale promises: the right number where it is known in closed form."""

import itertools
import json
import math
import re
import statistics

import pytest
import torch

from accumplug.accumulator import Accumulator
from accumplug.noise.scale import NoiseEstimate, NoiseScale


def windows_of_a_linear_model(mean, deviation, micro, steps, windows, seed):
    """Norms of windows of the model `loss = w . x`, whose gradient for an item is x itself.

    With x normal around `mean`, trace(Sigma) is the sum of squared deviations.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.zeros_like(mean, requires_grad=True)
    for _ in range(windows):
        noise = torch.randn(steps, micro, len(mean), generator=generator, dtype=mean.dtype)
        norms = []
        for count in (1, steps):
            items = (mean + deviation * noise)[:count].reshape(-1, len(mean))
            (gradient,) = torch.autograd.grad((items @ weight).mean(), weight)
            norms.append(float(gradient.square().sum()))
        yield norms[0], norms[1], float(micro), float(micro * steps)


MEAN = torch.linspace(0.1, 0.5, 30, dtype=torch.float64)
DEVIATION = torch.linspace(0.5, 1.5, 30, dtype=torch.float64)
TRUE = float(DEVIATION.square().sum() / MEAN.square().sum())


def test_the_estimate_meets_the_closed_form_of_a_linear_model():
    """Over 2000 windows it comes within 3 % (the interval of so many windows is that wide)."""
    noise = NoiseScale(decay=0.9999)
    for window in windows_of_a_linear_model(MEAN, DEVIATION, 4, 8, 2000, seed=0):
        assert noise.update(*window)
    now = noise.estimate
    assert now.value == pytest.approx(TRUE, rel=0.03)
    assert now.gradient_sq == pytest.approx(float(MEAN.square().sum()), rel=0.03)
    assert now.trace == pytest.approx(float(DEVIATION.square().sum()), rel=0.03)
    assert now.low < TRUE < now.high < 1.1 * now.low


def test_both_estimators_are_unbiased():
    """Over all windows of 3 items out of a population of 3 the mean is exact, at B of 1 and 3."""
    population = torch.tensor([[1.0, 2.0], [-3.0, 0.5], [2.0, 2.0]], dtype=torch.float64)
    mean = population.mean(0)
    trace = float((population - mean).square().sum() / len(population))
    noise = NoiseScale(decay=1 - 1e-12)
    for choice in itertools.product(range(3), repeat=3):
        items = population[list(choice)]
        small, big = items[0].square().sum(), items.mean(0).square().sum()
        noise.update(float(small), float(big), 1, 3)
    assert noise.estimate.trace == pytest.approx(trace, rel=1e-6)
    assert noise.estimate.gradient_sq == pytest.approx(float(mean.square().sum()), rel=1e-6)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    """95 % intervals from 20 windows hold the true value in at least 90 of 100 runs."""
    held = 0
    for seed in range(100):
        noise = NoiseScale(decay=0.999)
        for window in windows_of_a_linear_model(MEAN, DEVIATION, 4, 4, 20, seed=seed):
            noise.update(*window)
        held += noise.estimate.low <= TRUE <= noise.estimate.high
    assert held >= 90


def test_the_ends_of_the_interval_are_fiellers():
    """At either end R, mean(trace - R |G|^2) is just 2.093 standard errors from 0 (t, 19)."""
    noise, estimates = NoiseScale(decay=1 - 1e-12), []
    for small, big, b, c in windows_of_a_linear_model(MEAN, DEVIATION, 4, 4, 20, seed=7):
        noise.update(small, big, b, c)
        estimates.append(((small - big) / (1 / b - 1 / c), (c * big - b * small) / (c - b)))
    now = noise.estimate
    for end in (now.low, now.high):
        gaps = [trace - end * gradient_sq for trace, gradient_sq in estimates]
        error = statistics.stdev(gaps) / math.sqrt(20)
        assert abs(statistics.fmean(gaps)) / error == pytest.approx(2.093, rel=2e-3)


def test_smoothing_is_the_bias_corrected_average_of_numerator_and_denominator():
    """Against the textbook form: sum of (1-d) d^(n-i) x_i, divided by 1 - d^n."""
    decay, sums, noise = 0.9, [0.0, 0.0], NoiseScale(decay=0.9)
    for small, big in [(5.0, 1.0), (3.0, 2.0), (9.0, 0.5)]:
        noise.update(small, big, 2, 8)
        trace = (small - big) / (1 / 2 - 1 / 8)
        gradient_sq = (8 * big - 2 * small) / (8 - 2)
        sums = [
            decay * s + (1 - decay) * x for s, x in zip(sums, (trace, gradient_sq), strict=True)
        ]
    corrected = [s / (1 - decay**3) for s in sums]
    assert noise.estimate.trace == pytest.approx(corrected[0], rel=1e-12)
    assert noise.estimate.gradient_sq == pytest.approx(corrected[1], rel=1e-12)


def test_an_unresolved_gradient_gives_no_value_and_an_open_interval():
    """Pure noise has no noise scale: the interval has no upper end (17 of 20 runs at least)."""
    zero, open_ended = torch.zeros(30, dtype=torch.float64), 0
    for seed in range(20):
        noise = NoiseScale()
        for window in windows_of_a_linear_model(zero, DEVIATION, 2, 4, 30, seed=seed):
            noise.update(*window)
        open_ended += noise.estimate.high == math.inf
        assert (noise.estimate.value is None) == (noise.estimate.gradient_sq <= 0)
    assert open_ended >= 17
    assert NoiseScale().estimate == NoiseEstimate(None, 0.0, math.inf, 0.0, 0.0, 0)


def test_windows_that_say_nothing_are_left_out():
    """Equal sizes and numbers that are not finite change nothing; nonsense is refused."""
    noise = NoiseScale()
    assert not noise.update(1.0, 1.0, 4, 4)
    assert not noise.update(math.nan, 1.0, 1, 4)
    assert not noise.update(1.0, math.inf, 1, 4)
    assert noise.estimate.windows == 0
    with pytest.raises(ValueError, match=r"norms must be >= 0 and weights > 0"):
        noise.update(-1.0, 1.0, 1, 4)
    with pytest.raises(ValueError, match="decay must be at least 0 and below 1"):
        NoiseScale(decay=1.0)


def test_no_memory_means_no_interval():
    """With decay 0 only the last window counts, and one window has no spread."""
    noise = NoiseScale(decay=0.0)
    noise.update(5.0, 2.0, 1, 4)
    noise.update(4.0, 2.0, 1, 4)
    assert noise.estimate.trace == (4.0 - 2.0) / (1 - 1 / 4)
    assert (noise.estimate.low, noise.estimate.high) == (0.0, math.inf)


def test_state_goes_through_json_and_goes_on_bit_for_bit():
    """Half the windows, a save, the other half = all windows."""
    windows = list(windows_of_a_linear_model(MEAN, DEVIATION, 4, 4, 10, seed=2))
    whole, first, second = NoiseScale(decay=0.9), NoiseScale(decay=0.9), NoiseScale()
    for window in windows:
        whole.update(*window)
    for window in windows[:5]:
        first.update(*window)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for window in windows[5:]:
        second.update(*window)
    assert second.estimate == whole.estimate


@pytest.mark.parametrize(
    ("batch", "verdict", "words"),
    [
        (10, "below", "a larger batch still saves updates"),
        (100, "near", "few updates more"),
        (1000, "above", "would be wasted"),
    ],
)
def test_a_batch_is_compared_with_the_interval(batch, verdict, words):
    """Noise scale 100, known to be between 80 and 120."""
    now = NoiseEstimate(100.0, 80.0, 120.0, 1.0, 100.0, 50)
    assert now.compare(batch) == verdict
    assert words in now.sentence(batch)
    assert "estimate" in now.sentence(batch)


def test_a_wide_interval_is_called_unclear():
    """Between 10 and 1000 nothing can be said about 100, but 1 is below for sure."""
    now = NoiseEstimate(100.0, 10.0, 1000.0, 1.0, 100.0, 5)
    assert now.compare(100) == "unclear"
    assert now.compare(1) == "below"
    unknown = NoiseEstimate(None, 10.0, math.inf, -1.0, 100.0, 5)
    assert unknown.compare(1) == "below"
    assert unknown.compare(100) == "unclear"
    assert "not known after 5 windows (above 10 items)" in unknown.sentence(100)


def test_an_interval_without_an_end_is_said_in_words():
    """Open above: the lower end alone. Open on both sides: nothing is known, value or not."""
    above = NoiseEstimate(100.0, 10.0, math.inf, 1.0, 100.0, 5)
    assert "100 tokens (95 %: above 10), an estimate" in above.sentence(20, "tokens")
    for value in (100.0, None):
        nothing = NoiseEstimate(value, 0.0, math.inf, 1.0, 100.0, 2).sentence(20)
        assert nothing.startswith("Gradient noise scale: not known after 2 windows; it needs more")


@pytest.mark.parametrize("weights", [(4, 4, 4, 4), (2, 6, 3, 5)])
def test_an_accumulator_feeds_it_the_two_norms_of_each_window(weights):
    """The first micro-batch and the window, by weight, as by hand from plain gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 1, bias=False).double()
    accum = Accumulator(4, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    accum.noise_scale = NoiseScale()
    by_hand = NoiseScale()
    for _ in range(5):
        items = MEAN + DEVIATION * torch.randn(sum(weights), 30, dtype=torch.float64)
        for micro_batch in items.split(weights):
            with accum(model, weight=len(micro_batch)):
                accum.backward(model(micro_batch).mean())
        small, big = items[: weights[0]].mean(0), items.mean(0)  # the gradient of w . x is x
        by_hand.update(
            float(small.square().sum()), float(big.square().sum()), weights[0], sum(weights)
        )
    ours, theirs = accum.noise_scale.estimate, by_hand.estimate
    assert ours.windows == 5
    assert ours.trace == pytest.approx(theirs.trace, rel=1e-9)
    assert ours.gradient_sq == pytest.approx(theirs.gradient_sq, rel=1e-9)


class Heard(NoiseScale):
    """A noise scale that keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.windows = []

    def update(self, *numbers):
        self.windows.append(numbers)
        return super().update(*numbers)


def squared(loss, parameters):
    return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, parameters))


def hear(sizes, *, stepped=slice(None), loss_of=None, loop_steps=False, scaler=None, **options):
    """Run one window; give what its noise scale was told, the model, and the micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(list(model.parameters())[stepped], lr=0.0)
    optimizers = {} if loop_steps else {"optimizer": optimizer}
    accum = Accumulator(len(sizes), scaler=scaler, **optimizers, **options)
    accum.noise_scale = Heard()
    pieces = torch.randn(sum(sizes), 6, dtype=torch.float64).split(sizes)
    for number, piece in enumerate(pieces):
        with accum(model, weight=len(piece)) as micro:
            loss = model(piece).square().mean()
            accum.backward(loss if loss_of is None else loss_of(number, loss))
            if loop_steps and micro.closes:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return accum.noise_scale.windows, model, pieces


def norms(parameters, model, small, large):
    """What should have been told: plain gradients of the mean loss over `small` and `large`."""
    parameters = list(parameters)
    return [
        squared(model(small).square().mean(), parameters),
        squared(model(large).square().mean(), parameters),
        len(small),
        len(large),
    ]


def test_both_norms_are_of_what_the_optimizer_steps():
    """A model of which only the last layer is trained, though all of it has gradients."""
    windows, model, pieces = hear((2, 3, 4), stepped=slice(2, 4))
    assert windows == [
        pytest.approx(norms(model[1].parameters(), model, pieces[0], torch.cat(pieces)))
    ]


@pytest.mark.parametrize("loop_steps", [True, False])
def test_a_scaler_leaves_both_norms_as_they_are(loop_steps):
    """Both come without the scale, whoever takes the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    windows, model, pieces = hear((2, 3, 4), loop_steps=loop_steps, scaler=scaler)
    assert windows == [
        pytest.approx(norms(model.parameters(), model, pieces[0], torch.cat(pieces)))
    ]


def test_a_first_micro_batch_that_was_left_out_says_nothing():
    """Its norm is not 0 but not known: the window is not used, and the next one is."""
    nan = lambda number, loss: loss * math.nan if number == 0 else loss  # noqa: E731
    windows, _, _ = hear((2, 3, 4), loss_of=nan, nonfinite="skip_micro_batch")
    assert windows == []
    windows, model, pieces = hear((2, 3, 4), nonfinite="skip_micro_batch")
    assert windows == [
        pytest.approx(norms(model.parameters(), model, pieces[0], torch.cat(pieces)))
    ]


def test_two_backwards_of_one_micro_batch_are_one_gradient():
    """Two terms of the same objective: the small norm is that of both, as the large one is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)).double()
    accum = Accumulator(3, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    accum.noise_scale = Heard()
    pieces = torch.randn(9, 6, dtype=torch.float64).split((2, 3, 4))
    for piece in pieces:
        with accum(model, weight=len(piece)):
            accum.backward(0.3 * model(piece).square().mean())
            accum.backward(0.7 * model(piece).square().mean())
    assert accum.noise_scale.windows == [
        pytest.approx(norms(model.parameters(), model, pieces[0], torch.cat(pieces)))
    ]


@pytest.mark.parametrize("decay", ["0.9", None, True, [0.9]])
def test_a_decay_that_is_no_number_is_a_type_error(decay):
    """The message shows what came."""
    with pytest.raises(TypeError, match=f"decay must be a number, got {re.escape(repr(decay))}"):
        NoiseScale(decay=decay)
