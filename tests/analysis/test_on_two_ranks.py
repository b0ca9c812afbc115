"""What counting, sweeping and fitting promise with two real ranks (DDP over gloo on loopback)."""

import contextlib
import io
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from accumplug.analysis.equivalence import equivalence_check
from accumplug.analysis.memory_fit import launched_ranks
from accumplug.analysis.sweep import sweep_effective_batches
from accumplug.analysis.sync_counter import sync_counter, train_one_optimizer_step
from accumplug.cli.parser import main

CRITERION = nn.CrossEntropyLoss()
FITTING = """
import os
import torch
from torch import nn


def parts():
    holds = 9 if os.environ["RANK"] == "0" else 5

    def loss(model, batch):
        if len(batch) > holds:
            raise torch.OutOfMemoryError("pretended")
        return model(batch).mean()

    return nn.Linear(3, 1), torch.ones(2, 3), loss
"""


def setup(seed=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(12, 6, generator=generator)
    targets = torch.randint(0, 3, (12,), generator=generator)
    return model, list(zip(inputs.split(3), targets.split(3), strict=True))


class Loose(nn.Module):
    """Has a parameter that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def _rank(rank, folder):
    """What each rank does; what it found is saved for the tests."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    folder = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, micro_batches = setup(seed=rank)
    with sync_counter(model) as counter:
        for x, y in micro_batches:
            CRITERION(counter.model(x), y).backward()
        found = {"world": dist.get_world_size(), "plain": counter.syncs}
    model.zero_grad()
    del counter
    step = train_one_optimizer_step(
        model, torch.optim.SGD(model.parameters(), lr=0.5), micro_batches, CRITERION
    )
    found |= {"syncs": step.syncs, "loss": step.loss, "weights": model.state_dict()}
    curve = sweep_effective_batches(
        model, micro_batches, CRITERION, accum_steps=(1, 4), num_steps=4, output_dir=folder
    )
    found["rows"] = [(r.world_size, r.effective_batch, r.sync_calls) for r in curve.rows]
    settled = nn.parallel.DistributedDataParallel(Loose(), find_unused_parameters=True)
    curve = sweep_effective_batches(
        settled, micro_batches, CRITERION, accum_steps=(2,), num_steps=2, output_dir=None
    )
    found["settled"] = [row.sync_calls for row in curve.rows]
    curve = sweep_effective_batches(
        Loose(), micro_batches, CRITERION, accum_steps=(2,), num_steps=2, output_dir=None
    )
    found["settled"] += [row.sync_calls for row in curve.rows]
    del settled
    with launched_ranks() as (ranks, smallest):
        found["smallest"] = (ranks, smallest(10 + rank))
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["plan", "64", "--fit", "fitting.py:parts", "--device", "cpu"])
    found["planned"] = (code, said.getvalue())
    try:
        equivalence_check(model, micro_batches[0], CRITERION)
    except RuntimeError as error:
        found["refused"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two processes, once for all tests; they are gone afterwards whatever happened."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "fitting.py").write_text(FITTING)
    context = mp.start_processes(
        _rank, args=(str(folder),), nprocs=2, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + 200
    try:
        while not context.join(timeout=5):  # True once all have ended
            assert time.monotonic() < deadline, "the ranks did not end in time"
    finally:
        for process in context.processes:
            process.kill()
    found = [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
    assert [rank["world"] for rank in found] == [2, 2]
    return found, folder


def test_a_window_reduces_once_instead_of_four_times(ranks):
    """4 reductions plain, 1 accumulated."""
    assert [(rank["plain"], rank["syncs"]) for rank in ranks[0]] == [(4, 1), (4, 1)]


def test_the_step_is_that_of_all_ranks_items_at_once(ranks):
    """Loss and weights are those of plain torch on 24 items in one process."""
    model, first = setup(seed=0)
    batches = [*first, *setup(seed=1)[1]]
    loss = CRITERION(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for rank in ranks[0]:
        assert rank["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-5, atol=1e-7)


def test_a_sweep_counts_the_ranks_and_writes_one_file(ranks):
    """Effective batch = 3 x steps x 2 ranks, one reduction per update."""
    found, folder = ranks
    assert [rank["rows"] for rank in found] == [[(2, 6, 1.0), (2, 24, 1.0)]] * 2
    assert (folder / "accum-curve.json").is_file()
    assert [rank["settled"] for rank in found] == [[1.0, 1.0]] * 2, (
        "DDP's settings are kept, or found"
    )


def test_ranks_agree_on_the_micro_batch_that_fits_all_of_them(ranks):
    """One rank holds 8 of the 32 items, the other 4: both take 4, and the first one says so."""
    assert [rank["smallest"] for rank in ranks[0]] == [(2, 10), (2, 10)]
    assert [rank["planned"] for rank in ranks[0]] == [
        (0, "steps 8: 4 items x 8 micro-batches x 2 ranks = 64 items\n"),
        (0, ""),
    ]


def test_the_check_sends_several_ranks_away(ranks):
    """It is for a single process, and says so."""
    assert all("run it without torchrun" in rank["refused"] for rank in ranks[0])
