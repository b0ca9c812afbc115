"""A loader is lent the batches of a redistributed pass, if this torch has a place for them."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from accumplug.dataloading.resharding import use_batches
from accumplug.errors import MovedError


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_goes_through_the_batches_that_are_lent(workers: int) -> None:
    """And through its own afterwards, with workers that stay too."""
    loader = DataLoader(range(6), 2, num_workers=workers, persistent_workers=workers > 0)
    own = [batch.tolist() for batch in loader]
    with use_batches(loader, [[5, 0], [3]]):
        lent = [batch.tolist() for batch in loader]
    assert lent == [[5, 0], [3]]
    assert [batch.tolist() for batch in loader] == own


def test_a_loader_that_reads_its_batches_elsewhere_is_named() -> None:
    """Else its own order would be trained on again, in silence."""

    class Newer(DataLoader[int]):
        _index_sampler = None

    moved = pytest.raises(MovedError, match=r"moved DataLoader\._index_sampler")
    with moved, use_batches(Newer(range(6), 2), [[0]]):  # type: ignore[arg-type]
        pass


def test_an_iterator_that_keeps_its_batches_elsewhere_is_named() -> None:
    """With persistent_workers, what it was made with would be trained on again, in silence."""
    loader = DataLoader(range(6), 2)  # type: ignore[arg-type]
    loader._iterator = object()  # type: ignore[assignment]
    with (
        pytest.raises(MovedError, match=r"moved object\._index_sampler"),
        use_batches(loader, [[0]]),
    ):
        pass
