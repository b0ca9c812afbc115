"""What the check promises: it passes where plain torch agrees, and says why where it can't."""

import functools
import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accumplug.analysis.equivalence import equivalence_check
from accumplug.analysis.precision import FORMATS, Precision, float32_products
from accumplug.dataloading.batch_tree import items_in


def classifier(*middle, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(items=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(items, 6, generator=generator).to(dtype)
    return inputs, torch.randint(0, 3, (items,), generator=generator)


CRITERION = nn.CrossEntropyLoss()


def reason(result):
    assert not result.passed
    return " | ".join(result.reasons)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float64, 1e-13),  # rounding of double precision over a dozen additions
        (torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize("splits", [None, [(12,)], [(1,) * 12], [(1, 11), (5, 3, 4)]])
def test_a_plain_model_passes_for_any_split(dtype, bound, splits):
    """Even, uneven, single-item splits: the difference is rounding."""
    result = equivalence_check(
        classifier(dtype=dtype), data(dtype=dtype), CRITERION, splits=splits, bound=bound
    )
    assert result.passed, str(result)
    assert result.max_abs_diff <= bound
    assert result.relative <= bound
    assert result.reasons == ()
    assert str(result).startswith("PASS: ")


def test_the_differences_are_those_of_plain_torch():
    """Per parameter and overall, against gradients accumulated by hand with a wrong loop."""
    model, (inputs, targets) = classifier(), data()

    def loop(model, pieces):
        for x, y in pieces:
            CRITERION(model(x), y).backward()

    result = equivalence_check(model, (inputs, targets), CRITERION, splits=[(6, 6)], loop=loop)
    whole = torch.autograd.grad(CRITERION(model(inputs), targets), list(model.parameters()))
    halves = [
        torch.autograd.grad(CRITERION(model(x), y), list(model.parameters()))
        for x, y in zip(inputs.split(6), targets.split(6), strict=True)
    ]
    gaps = [a + b - w for a, b, w in zip(*halves, whole, strict=True)]
    assert result.max_abs_diff == pytest.approx(max(float(g.abs().max()) for g in gaps))
    for (name, _), gap, one in zip(model.named_parameters(), gaps, whole, strict=True):
        assert result.parameters[name].max_abs == pytest.approx(float(gap.abs().max()), rel=1e-5)
        assert result.parameters[name].relative == pytest.approx(
            float(gap.norm() / one.norm()), rel=1e-5
        )
    flat, flat_whole = (
        torch.cat([g.flatten() for g in gaps]),
        torch.cat([g.flatten() for g in whole]),
    )
    assert result.relative == pytest.approx(float(flat.norm() / flat_whole.norm()), rel=1e-5)


class Pair(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "loss"),
    [
        (data(), lambda model, b: F.cross_entropy(model(b[0]), b[1])),
        ([*data()], F.cross_entropy),
        (data(), functools.partial(F.cross_entropy, label_smoothing=0.1)),
        (Pair(*data()), lambda model, b: F.cross_entropy(model(b.inputs), b.targets)),
        (data()[0], lambda model, b: model(b).square().mean()),
        (
            {"a": {"x": data()[0]}, "y": [data()[1]], "scale": torch.tensor(2.0), "name": "n"},
            lambda model, b: F.cross_entropy(model(b["a"]["x"]) * b["scale"], b["y"][0]),
        ),
        (
            {"x": data()[0], "words": ["zero", "one", "two"] * 4},
            lambda model, b: F.cross_entropy(
                model(b["x"]), torch.tensor([["zero", "one", "two"].index(w) for w in b["words"]])
            ),
        ),
    ],
    ids=["tuple", "list", "partial", "namedtuple", "tensor", "nested dict", "strings"],
)
def test_batches_of_any_shape_are_cut(batch, loss):
    """Tensors alone and nested, scalars and strings beside them."""
    result = equivalence_check(classifier(), batch, loss)
    assert result.passed, str(result)
    assert result.items == 12


def token_batch():
    """Uneven numbers of targets: -100 is ignored by cross_entropy."""
    inputs, targets = data()
    targets[:5] = -100
    return inputs, targets


def tokens(batch):
    return int((batch[1] != -100).sum())


def test_a_token_mean_passes_with_token_weights_and_without_says_which_it_needs():
    """The halves hold 1 and 6 targets: weights 0.143 : 0.857, and rows would say 0.5 : 0.5."""
    assert equivalence_check(classifier(), token_batch(), CRITERION, items=tokens).passed
    by_rows = equivalence_check(
        classifier(), token_batch(), CRITERION, splits=[(6, 6)], items=items_in
    )
    text = reason(by_rows)
    assert (
        "its micro-batches (2 x 6) count as 0.143 : 0.857, the given weights are 0.5 : 0.5" in text
    )
    assert "items=" in text


def test_weights_are_found_in_the_split_that_failed():
    """2, 4 and 6 rows hold 1, 2 and 3 targets, and agree; 5 and 7 hold 2 and 4."""
    inputs, targets = data()
    targets[::2] = -100
    splits = [(6, 6), (2, 4, 6), (5, 7)]
    batch = inputs, targets
    text = reason(equivalence_check(classifier(), batch, CRITERION, splits=splits, items=items_in))
    assert "its micro-batches (5 + 7) count as 0.333 : 0.667, the given weights are 0.417" in text


def test_a_gradient_of_zero_is_said_to_compare_nothing():
    """It passes, as 0 = 0, and says so."""
    model = classifier()
    result = equivalence_check(model, data(), lambda m, b: 0 * CRITERION(m(b[0]), b[1]))
    assert result.passed
    assert "note: the large batch's gradient is 0, so nothing was compared" in str(result)


def test_terms_with_different_denominators_are_told_apart():
    """A token mean and a row mean in one backward: the one that the weights miss is named."""
    losses = {
        "main": CRITERION,
        "balance": lambda model, batch: model(batch[0]).square().mean(),
    }
    text = reason(equivalence_check(classifier(), token_batch(), losses, items=tokens))
    assert "balance is a mean over other items than the weights count" in text
    assert "main is" not in text
    assert "extra=" in text


def test_batchnorm_is_named_and_passes_in_eval_mode():
    """Both BatchNorm modules are named; frozen they do no harm."""
    model = classifier(nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8)))
    text = reason(equivalence_check(model, data(), CRITERION))
    assert "BatchNorm (1, 2.0)" in text
    assert "couples" not in text
    assert equivalence_check(model.eval(), data(), CRITERION).passed


def test_batchnorm_and_a_coupling_loss_are_both_found():
    """One cause does not hide the other."""
    model = classifier(nn.BatchNorm1d(8))
    text = reason(equivalence_check(model, data(), contrastive))
    assert "BatchNorm (1)" in text
    assert "the loss couples samples" in text


def contrastive(model, batch):
    rows = F.normalize(model(batch[0]))
    return F.cross_entropy(rows @ rows.detach().T, torch.arange(len(rows)))


def test_a_loss_that_couples_samples_is_found_by_running_it():
    """A contrastive loss without a telling name; with several losses the guilty one is named."""
    assert "the loss couples samples" in reason(
        equivalence_check(classifier(), data(), contrastive)
    )
    losses = {"classes": CRITERION, "pairs": contrastive}
    text = reason(equivalence_check(classifier(), data(), losses))
    assert "pairs couples samples" in text
    assert "classes" not in text


def test_a_loss_that_looks_at_the_order_is_found_by_permuting():
    """Neighbours are compared: a permuted batch has other neighbours."""

    def neighbours(model, batch):
        out = model(batch[0])
        return (out[1:] - out[:-1]).square().mean()

    text = reason(equivalence_check(classifier(), data(), neighbours))
    assert "the loss depends on the order of the items" in text


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_a_module_that_mixes_rows_is_found_by_what_it_does():
    """A home-made layer that no list of names could hold."""
    text = reason(equivalence_check(classifier(nn.Sequential(Centred())), data(), CRITERION))
    assert "1.0 (Centred) mixes the items" in text


def test_dropout_is_named_and_the_rest_is_judged_without_it():
    """Other masks for micro-batches; in eval mode the difference is rounding."""
    model = classifier(nn.Dropout(0.5), nn.Dropout(0.1))
    text = reason(equivalence_check(model, data(), CRITERION))
    assert "dropout without a fixed seed in 1, 2:" in text
    assert "so everything else is right" in text
    assert equivalence_check(model.eval(), data(), CRITERION).passed


def test_masks_that_happen_to_be_the_same_are_no_obstacle():
    """One dropout layer on the CPU draws row after row: cut or whole, each row has its mask.

    The check passes, and says that this is luck.
    """
    result = equivalence_check(classifier(nn.Dropout(0.5)), data(), CRITERION)
    assert result.passed
    said = "dropout without a fixed seed in 1: here, the micro-batches happened to draw the same"
    assert f"note: {said}" in str(result)
    assert equivalence_check(classifier(nn.Dropout(0.5)).eval(), data(), CRITERION).notes == ()


def test_dropout_does_not_hide_batchnorm():
    """Both are said."""
    model = classifier(nn.Dropout(0.5), nn.BatchNorm1d(8))
    text = reason(equivalence_check(model, data(), CRITERION))
    assert "dropout without a fixed seed in 1:" in text
    assert "so everything else is right" not in text
    assert "BatchNorm (2)" in text


def test_random_numbers_of_a_loss_are_noticed():
    """Noise on the inputs, from no dropout module."""

    def noisy(model, batch):
        return CRITERION(model(batch[0] + torch.randn(batch[0].shape)), batch[1])

    text = reason(equivalence_check(classifier(), data(), noisy))
    assert "random numbers: the micro-batches draw other" in text
    assert "eval mode does not stop it, so nothing more can be found out" in text
    assert "couples" not in text
    assert "order" not in text


def test_a_loss_that_counts_its_calls_is_no_more_than_that():
    """Nothing else can be told of it: not that it couples samples, nor that order matters."""
    calls = []

    def drifting(model, batch):
        calls.append(1)
        return CRITERION(model(batch[0]), batch[1]) * len(calls)

    result = equivalence_check(classifier(), data(), drifting)
    assert "two runs from the same random state differ" in reason(result)
    assert len(result.reasons) == 1


class Warming(nn.Module):
    """Its output depends on how often it has run, which a buffer counts; as spectral norm's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.runs += 1
        return x * (1 + self.runs)


def test_buffers_that_each_forward_moves_on_are_named():
    """Two micro-batches move them twice; in eval mode they stay."""
    model = classifier(nn.Sequential(Warming()))
    text = reason(equivalence_check(model, data(), CRITERION))
    assert "each forward pass changes buffers that the next one reads (1.0.runs)" in text
    assert "so everything else is right" in text
    assert "couples" not in text
    assert model[1][0].runs == 0
    assert equivalence_check(model.eval(), data(), CRITERION).passed


def test_dropout_with_a_fixed_seed_for_each_row_passes():
    """A mask that is the same whatever stands beside a row is no obstacle."""

    class Seeded(nn.Module):
        def forward(self, x):
            mask = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(3)) > 0.5
            return x * mask

    assert equivalence_check(classifier(Seeded()), data(), CRITERION).passed


def test_a_sum_over_items_is_recognised_by_the_ratio():
    """k equal micro-batches give 1/k of it; said to be a sum, it passes."""
    summed = nn.CrossEntropyLoss(reduction="sum")
    text = reason(equivalence_check(classifier(), data(), summed))
    assert "2 micro-batches give 0.5 times" in text
    assert 'reduction="sum"' in text
    assert equivalence_check(classifier(), data(), summed, reduction="sum").passed


def test_a_loss_that_divides_by_its_items_twice_is_recognised():
    """The mean divided by the length once more: k equal micro-batches give k times as much."""

    def twice(model, batch):
        return CRITERION(model(batch[0]), batch[1]) / len(batch[0])

    text = reason(equivalence_check(classifier(), data(), twice))
    assert "2 micro-batches give 2 times the large batch's gradient: the loss is divided by" in text
    assert "once too often" in text


def test_a_mean_that_is_called_a_sum_is_recognised():
    """k equal micro-batches give k times as much."""
    text = reason(equivalence_check(classifier(), data(), CRITERION, reduction="sum"))
    assert "2 micro-batches give 2 times" in text
    assert "the loss is a mean over its items already, not a sum" in text


def test_a_sum_is_recognised_in_uneven_splits_too():
    """There is no ratio to see, but the halves add up to the whole."""
    summed = nn.CrossEntropyLoss(reduction="sum")
    text = reason(equivalence_check(classifier(), data(), summed, splits=[(5, 7)]))
    assert "the loss is a sum over its items" in text


def test_a_loss_that_divides_by_the_number_of_micro_batches_itself_is_recognised():
    """The textbook's loss / steps inside the loss function: divided twice."""

    def divided(model, batch):
        return CRITERION(model(batch[0]), batch[1]) * len(batch[0]) / 12

    text = reason(equivalence_check(classifier(), data(), divided, splits=[(3, 3, 3, 3)]))
    assert "4 micro-batches give 0.25 times the large batch's gradient, 1/4" in text
    assert "already divides by the whole batch or the number of micro-batches" in text


def textbook(divide):
    def loop(model, pieces):
        for x, y in pieces:
            (CRITERION(model(x), y) / divide(len(pieces))).backward()

    return loop


def test_ones_own_loop_can_be_checked():
    """Right, without the division, with it twice: passes, k and 1/k."""

    def check(divide, splits=((3,) * 4,)):
        return equivalence_check(
            classifier(), data(), CRITERION, loop=textbook(divide), splits=splits
        )

    assert check(lambda k: k).passed
    assert "4 micro-batches give 4 times" in reason(check(lambda k: 1))
    assert "nothing divides by the number" in reason(check(lambda k: 1))
    assert "1/4: it is divided twice by the number of micro-batches" in reason(
        check(lambda k: k * k)
    )
    assert "3 times the large batch's gradient: a constant factor" in reason(check(lambda k: k / 3))
    uneven = reason(check(lambda k: k, splits=[(2, 10)]))
    assert "2+10 count as 0.5 : 0.5; right is 0.167 : 0.833" in uneven


def test_a_loop_that_forgets_a_micro_batch_is_shown_which():
    """Its share is 0, not the rounding of a fit."""

    def loop(model, pieces):
        for x, y in pieces[:-1]:
            (CRITERION(model(x), y) / len(pieces)).backward()

    result = equivalence_check(classifier(), data(), CRITERION, loop=loop, splits=[(4, 4, 4)])
    assert "count as 0.333 : 0.333 : 0; right is 0.333 : 0.333 : 0.333" in reason(result)


def test_a_loop_that_steps_is_refused_and_the_weights_come_back():
    """There is no gradient to compare once the weights have moved."""
    model = classifier()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def loop(model, pieces):
        textbook(lambda k: k)(model, pieces)
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with pytest.raises(ValueError, match=r"loop has changed 0.weight.*leave the optimizer's step"):
        equivalence_check(model, data(), CRITERION, loop=loop)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_wrong_factor_does_not_hide_behind_a_small_gradient():
    """Gradients of 1e-7 are all within 1e-4 of each other; the relative difference is not."""

    def tiny(model, batch):
        return 1e-7 * CRITERION(model(batch[0]), batch[1])

    assert equivalence_check(classifier(), data(), tiny).passed

    def loop(model, pieces):
        for piece in pieces:
            tiny(model, piece).backward()

    result = equivalence_check(classifier(), data(), tiny, loop=loop, splits=[(6, 6)])
    assert result.max_abs_diff < 1e-6
    assert "2 micro-batches give 2 times" in reason(result)


def test_a_large_gradient_is_not_blamed_for_its_rounding():
    """Gradients of 1e6 differ by more than 1e-4 through rounding alone."""

    def huge(model, batch):
        return 1e7 * CRITERION(model(batch[0]), batch[1])

    result = equivalence_check(classifier(), data(), huge)
    assert result.passed, str(result)
    assert result.largest > 1e5


def test_parameters_without_a_gradient_are_named():
    """Unused by the loss: a note. Used by the large batch only: a reason."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.never, self.large = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            out = self.body(x)
            return out + self.large(out) if len(x) > 6 else out

    result = equivalence_check(Sometimes(), data(), CRITERION)
    assert "no gradient reached large.bias, large.weight in the micro-batches" in reason(result)
    assert result.notes == ("left without a gradient by this batch: never.weight, never.bias",)


def test_low_precision_is_called_by_its_name():
    """bfloat16 keeps 8 bits: under a bound of float32 its rounding is the reason."""
    model, batch = classifier(dtype=torch.bfloat16), data(dtype=torch.bfloat16)
    text = reason(equivalence_check(model, batch, CRITERION, bound=1e-4))
    assert text.startswith("no more than the rounding of bfloat16 (8e-03) may explain: check in")


@pytest.mark.parametrize("middle", [(), (nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.bfloat16, 0.03125),
        (torch.float16, 0.00390625),
        (torch.float32, 1e-4),
        (torch.float64, 1e-4),
    ],
)
def test_the_default_bound_follows_the_dtype(dtype, bound, middle):
    """4 times its rounding, where that is above 1e-4: a right loop passes, the textbook's faults
    do not (a factor of 2, and equal weights for 2 and 10 items)."""
    model, batch = classifier(*middle, dtype=dtype), data(dtype=dtype)
    splits = [(1,) * 12, (2, 10), (6, 6)]
    result = equivalence_check(model, batch, CRITERION, splits=splits)
    assert (result.passed, result.bound) == (True, bound), str(result)
    assert result.precision == str(dtype).removeprefix("torch.")
    for divide, split in ((lambda k: 1, (6, 6)), (lambda k: k, (2, 10))):
        wrong = equivalence_check(model, batch, CRITERION, loop=textbook(divide), splits=[split])
        assert not wrong.passed
        assert wrong.reasons


def autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return CRITERION(model(batch[0]), batch[1])


def test_autocast_is_noticed_and_hides_nothing_large():
    """Gradients are float32, but what the modules put out is not; BatchNorm is still found."""
    assert equivalence_check(classifier(), data(), autocast).bound == 0.03125
    text = reason(equivalence_check(classifier(), data(), autocast, bound=1e-4))
    assert text.startswith("no more than the rounding of bfloat16")
    text = reason(equivalence_check(classifier(nn.BatchNorm1d(8)), data(), autocast))
    assert "BatchNorm (1)" in text
    assert "couples" not in text


def test_a_micro_batch_without_targets_is_named():
    """The mean over no target is NaN; with weights that count targets it weighs 0."""
    inputs, targets = data()
    targets[:6] = -100
    text = reason(equivalence_check(classifier(), (inputs, targets), CRITERION, items=items_in))
    assert text.startswith("the loss of micro-batch 1 of 2 is not finite")
    assert equivalence_check(classifier(), (inputs, targets), CRITERION, items=tokens).passed


@pytest.mark.parametrize("ignored", [-100, 0])
def test_labels_that_are_ignored_are_not_counted(ignored):
    """Half of the first rows and a whole micro-batch: the weights are found, and said."""
    inputs, targets = data()
    targets[:5] = targets[8] = ignored
    left = int((targets != ignored).sum())
    criterion = nn.CrossEntropyLoss(ignore_index=ignored)
    for loss in (
        criterion,
        functools.partial(F.cross_entropy, ignore_index=ignored),
        {"a": criterion, "b": criterion},
    ):
        result = equivalence_check(
            classifier(), (inputs, targets), loss, splits=[(6, 6), (5, 7), (1, 11)]
        )
        assert result.passed, str(result)
        assert f"mean over the {left} targets that are not {ignored};" in result.notes[0]


def language_model(shift):
    """A loss inside of the model, as transformers has it: with labels shifted by one, or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def loss(model, batch):
        logits, labels = model(batch["ids"]), batch["labels"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    labels = torch.randint(0, 11, (12, 5))
    labels[:7, 2:] = -100
    labels[3, 0] = -100
    return model, {"ids": torch.randint(0, 11, (12, 5)), "labels": labels}, loss


@pytest.mark.parametrize(("shift", "targets"), [(False, 38), (True, 27)])
def test_shifted_labels_are_told_from_labels_as_they_are(shift, targets):
    """The first column has no target where the model shifts; 7 x 3 + 1 labels are ignored.

    Also with a micro-batch that has no target at all, whose loss is NaN.
    """
    model, batch, loss = language_model(shift)
    result = equivalence_check(model, batch, loss)
    assert result.passed, str(result)
    assert f"mean over the {targets} targets that are not -100" in result.notes[0]
    batch["labels"][:6] = -100
    left = int((batch["labels"][:, int(shift) :] != -100).sum())
    result = equivalence_check(model, batch, loss)
    assert result.passed, str(result)
    assert f"mean over the {left} targets that are not -100" in result.notes[0]


def test_a_loss_over_rows_is_not_weighted_by_labels_that_another_part_ignores():
    """Integers of -100 that the loss does not ignore are data."""
    inputs, targets = data()
    batch = {"x": inputs, "y": targets, "depth": torch.tensor([-100] * 5 + [3] * 7)}
    result = equivalence_check(
        classifier(), batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])
    )
    assert result.passed, str(result)
    assert result.notes == ()


def test_a_batch_in_which_every_label_is_ignored_is_refused():
    """There is nothing to compare."""
    inputs, targets = data()
    with pytest.raises(ValueError, match="counts 0 items in the large batch"):
        equivalence_check(classifier(), (inputs, torch.full_like(targets, -100)), CRITERION)


@pytest.fixture
def tf32():
    """Sets TF32 in products and in cuDNN; the settings come back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def set_them(products, convolutions):
        matmul.allow_tf32, cudnn.allow_tf32 = products, convolutions

    before = matmul.allow_tf32, cudnn.allow_tf32
    yield set_them
    set_them(*before)


def test_on_cuda_the_settings_of_tf32_and_cudnn_are_read(tf32):
    """TF32 in products or, where the model convolves, in cuDNN is the coarsest format there."""
    linear, convolving = nn.Linear(2, 2), nn.Conv1d(1, 1, 1)
    tf32(False, True)
    assert float32_products(linear)[0] not in FORMATS
    mode, text = float32_products(convolving)
    assert mode == "tf32"
    assert text.startswith("TF32 in matrix products off, in cuDNN convolutions on; cuDNN benchmark")
    tf32(True, False)
    for model in (linear, convolving):
        mode, text = float32_products(model)
        assert mode == "tf32"
        assert text.startswith("TF32 in matrix products on, in cuDNN convolutions off")


def test_tf32_on_cuda_has_its_bound_and_is_printed(monkeypatch):
    """As if the model were there: the bound is 4 times 2^-10, and a line tells the settings."""

    def on_cuda(case, reference):
        return Precision(*FORMATS["tf32"], settings="TF32 in matrix products on")

    monkeypatch.setattr("accumplug.analysis.equivalence.precision_of", on_cuda)
    result = equivalence_check(classifier(), data(), CRITERION)
    assert result.bound == 4 * 2.0**-10
    lines = str(result).splitlines()
    assert "TF32 rounds to 9.8e-04" in lines[2]
    assert lines[3] == "settings: TF32 in matrix products on"


def test_a_root_of_a_mean_is_no_mean():
    """Its halves count by values, not by items."""

    def rmse(model, batch):
        return model(batch[0]).square().mean().sqrt()

    text = reason(equivalence_check(classifier(), data(), rmse))
    assert "the loss is no mean over items" in text


def test_the_check_runs_where_gradients_are_switched_off():
    """Called under no_grad it still has gradients to compare."""
    with torch.no_grad():
        assert equivalence_check(classifier(), data(), CRITERION).passed


def test_a_gradient_that_is_not_finite_fails_and_is_said():
    """NaN in the large batch itself."""

    def broken(model, batch):
        return CRITERION(model(batch[0]), batch[1]) * float("nan")

    assert "gradient is not finite" in reason(equivalence_check(classifier(), data(), broken))


def test_the_model_comes_back_as_it_was():
    """Weights, gradients, buffers, modes and the random states of torch and Python."""
    model = classifier(nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[1].eval()
    model[0].weight.grad = torch.full_like(model[0].weight, 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1), random.random()
    torch.manual_seed(5)
    random.seed(5)

    def meddling(model, batch):
        random.random()
        model.train()
        return CRITERION(model(batch[0]), batch[1])

    assert not equivalence_check(model, data(), meddling).passed
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 7.0))
    assert model[4].weight.grad is None
    assert (torch.rand(1), random.random()) == expected


def test_a_model_comes_back_after_an_error_too():
    """The loss raises in a micro-batch: gradients and buffers are as before."""
    model = classifier(nn.BatchNorm1d(8))
    model[0].weight.grad = torch.ones_like(model[0].weight)

    def fails(model, batch):
        if len(batch[0]) < 12:
            raise OSError("disk")
        return CRITERION(model(batch[0]), batch[1])

    with pytest.raises(OSError, match="disk"):
        equivalence_check(model, data(), fails)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[1].num_batches_tracked == 0


def test_the_answer_of_a_failure_names_its_reason():
    """What a reader sees: the verdict first, then the numbers, then why."""
    lines = str(equivalence_check(classifier(nn.BatchNorm1d(8)), data(), CRITERION)).splitlines()
    assert lines[0].startswith("FAIL: ")
    assert "the gradient is not that of one large batch of 12 items" in lines[0]
    assert "bound 1e-04" in lines[1]
    assert "float32 rounds to 1.2e-07" in lines[2]
    assert any("2 + 3 + 7" in line for line in lines)
    assert any(line.startswith("why: BatchNorm (1)") for line in lines)


class Output:
    """As models of transformers give it: large to print, with the loss inside."""

    def __init__(self, batch):
        self.loss, self.logits = batch[0].sum(), batch[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": [(5, 5)]}, r"sizes \(5, 5\) do not add up to the batch's 12 items"),
        ({"splits": [(12, 0)]}, r"sizes \(12, 0\).* every micro-batch needs at least 1"),
        ({"splits": [(-12, 24)]}, r"sizes \(-12, 24\).* every micro-batch needs at least 1"),
        ({"splits": [()]}, r"sizes \(\) do not add up"),
        ({"bound": -1e-4}, "bound must be a number of at least 0, got -0.0001"),
        ({"bound": float("nan")}, "bound must be a number of at least 0, got nan"),
        ({"splits": []}, "at least one split"),
        ({"batch": ("no", "tensors")}, "found no tensor with a first dimension"),
        ({"batch": data(1)}, "at least 2 items to split, got 1"),
        ({"batch": data(0)}, "at least 2 items to split, got 0"),
        ({"reduction": "none"}, 'reduction must be "mean" or "sum"'),
        (
            {"loss_fn": nn.CrossEntropyLoss(reduction="none")},
            r"a 0-dim tensor, got a tensor of shape \(12,\)",
        ),
        ({"loss_fn": lambda model, batch: batch[0].sum()}, "does not depend on any parameter"),
        (
            {"batch": (*data(), 1)},
            r"criterion of torch needs .* pair \(inputs, targets\), got a tuple",
        ),
        ({"loss_fn": {}}, "at least one loss"),
        ({"items": lambda batch: 0}, "items= counts 0 items in the large batch"),
        ({"items": lambda batch: float("nan")}, "items= counts nan items in the large batch"),
    ],
)
def test_what_can_not_be_checked_is_refused(change, message):
    """Each with the numbers that were seen."""
    arguments = {"model": classifier(), "batch": data(), "loss_fn": CRITERION, **change}
    with pytest.raises(ValueError, match=message):
        equivalence_check(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "model"}, "model must be a torch.nn.Module, got a str"),
        ({"model": lambda x: x}, "model must be a torch.nn.Module, got a function"),
        ({"loss_fn": "mse"}, "loss_fn must be a function or a criterion of torch, got 'mse'"),
        ({"loss_fn": {"a": 3}}, "loss_fn must be a function or a criterion of torch, got 3"),
        ({"loss_fn": lambda m, b: Output(b)}, "0-dim tensor, got a Output; return its .loss"),
        ({"loss_fn": lambda m, b: 1.5}, "0-dim tensor, got a float"),
        ({"items": 12}, "items must be a function that counts a batch, got 12"),
        ({"bound": "1e-4"}, "'>=' not supported"),
    ],
)
def test_wrong_types_are_type_errors(change, message):
    """Each names the argument and shows what came."""
    arguments = {"model": classifier(), "batch": data(), "loss_fn": CRITERION, **change}
    with pytest.raises(TypeError, match=message):
        equivalence_check(**arguments)
