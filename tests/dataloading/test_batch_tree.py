"""What cutting promises: the same items in the same order, and nothing else touched."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumplug.dataloading.batch_tree import cut, items_in, mapped, take


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_the_pieces_joined_are_the_batch(sizes):
    """Whatever the sizes."""
    batch = torch.arange(3 * sum(sizes)).reshape(-1, 3)
    pieces = cut(batch, sizes)
    assert [len(piece) for piece in pieces] == sizes
    assert torch.equal(torch.cat(pieces), batch)


@dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_nested_parts_are_cut_and_the_others_kept():
    """Dataclasses, dict-likes, arrays and lists of strings; scalars and tables stay whole."""
    table = torch.ones(7, 2)
    batch = {
        "sample": Sample(torch.arange(4), "left"),
        "dict-like": UserDict({"y": torch.arange(4) * 10}),
        "array": torch.arange(4).numpy(),
        "words": ["a", "b", "c", "d"],
        "table": table,
        "scale": torch.tensor(2.0),
        "none": None,
    }
    assert items_in(batch) == 4
    found = take(batch, torch.tensor([3, 1]))
    assert type(found["sample"]) is Sample
    assert found["sample"].name == "left"
    assert found["sample"].x.tolist() == [3, 1]
    assert isinstance(found["dict-like"], UserDict)
    assert found["dict-like"]["y"].tolist() == [30, 10]
    assert batch["dict-like"]["y"].tolist() == [0, 10, 20, 30], "the batch itself is unchanged"
    assert found["array"].tolist() == [3, 1]
    assert found["words"] == ["d", "b"]
    assert found["table"] is table
    assert found["scale"] is batch["scale"]
    assert found["none"] is None
    assert take(batch, slice(1, 3))["words"] == ["b", "c"]


def test_a_pair_of_tensors_is_no_list_of_two_items():
    """(inputs, targets) of 2 items: the tensors are cut, not the pair."""
    batch = (torch.arange(6).reshape(2, 3), torch.arange(2))
    first, second = cut(batch, (1, 1))
    assert first[0].tolist() == [[0, 1, 2]]
    assert second[1].tolist() == [1]


def test_mapped_replaces_what_it_is_told_and_goes_into_the_rest():
    """Every tensor doubled, whatever it lies in."""

    def twice(value):
        return value * 2 if isinstance(value, torch.Tensor) else NotImplemented

    found = mapped({"a": [torch.ones(1), (torch.ones(2), "b")]}, twice)
    assert found["a"][0].tolist() == [2.0]
    assert found["a"][1][0].tolist() == [2.0, 2.0]
    assert found["a"][1][1] == "b"


def test_sizes_that_do_not_add_up_are_refused():
    """With the sizes and the items."""
    with pytest.raises(ValueError, match=r"sizes \(2, 1\) do not add up to the batch's 4 items"):
        cut(torch.ones(4), (2, 1))
    with pytest.raises(ValueError, match="no tensor with a first dimension in the batch, a dict"):
        items_in({"a": 1})
