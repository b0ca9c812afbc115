"""The recipes' text and model: nothing lost, nothing twice, weights that count what they say."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from corpus import (
    IGNORED,
    START,
    RankBatches,
    collate,
    cut,
    deal,
    hold_out,
    number_characters,
    read_documents,
)
from model import LanguageModel, nats
from options import warm_up_and_decay

documents = st.lists(st.text("abcdé\n", min_size=1, max_size=40), min_size=1, max_size=12)


@given(documents, st.integers(1, 15))
def test_every_character_is_a_target_once_and_in_order(texts: list[str], length: int) -> None:
    """The targets of a document's sequences, joined, are the document; inputs are what stood
    before; all sequences but the last are full."""
    ids = number_characters(texts)
    sequences = iter(cut(texts, ids, length))
    for text in texts:
        own = [next(sequences) for _ in range(math.ceil(len(text) / length))]
        expected = [ids[character] for character in text]
        assert [i for s in own for i in s[1:].tolist()] == expected
        assert [i for s in own for i in s[:-1].tolist()] == [START, *expected[:-1]]
        assert [len(s) - 1 for s in own[:-1]] == [length] * (len(own) - 1)
    assert next(sequences, None) is None


@given(documents, st.integers(1, 15))
def test_the_weight_is_the_number_of_targets_that_count(texts: list[str], length: int) -> None:
    """What collate counts is what cross_entropy takes a mean over, padding left out."""
    sequences = cut(texts, number_characters(texts), length)
    inputs, targets, weight = collate(sequences)
    assert weight == (targets != IGNORED).sum().item() == sum(map(len, texts))
    assert inputs.shape == targets.shape
    assert inputs.min() >= START


@given(documents)
def test_held_out_documents_and_the_rest_are_all_there_are(texts: list[str]) -> None:
    """Every tenth is held out; a single document is cut, without losing a character."""
    if len(texts) == 1 and len(texts[0]) == 1:
        with pytest.raises(ValueError, match="one character"):
            hold_out(texts)
        return
    train, held_out = hold_out(texts)
    assert train
    assert held_out
    if len(texts) == 1:
        assert train[0] + held_out[0] == texts[0]
    else:
        assert Counter(train) + Counter(held_out) == Counter(texts)


@given(
    items=st.integers(1, 60),
    size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_ranks_share_the_order_of_one_rank(
    items: int, size: int, world_size: int, epoch: int
) -> None:
    """Rank r's i-th micro-batch is number i * ranks + r of a single rank's; none is lost."""

    def batches(rank: int, ranks: int) -> list[list[int]]:
        order = RankBatches(items, size, seed=3, rank=rank, world_size=ranks)
        order.set_epoch(epoch)
        assert len(order) == len(list(order))
        return list(order)

    alone = batches(0, 1)
    assert sorted(i for batch in alone for i in batch) == list(range(items))
    for rank in range(world_size):
        assert batches(rank, world_size) == alone[rank::world_size]


@given(documents, st.integers(1, 5), st.integers(1, 4))
def test_held_out_text_is_dealt_out_once(texts: list[str], size: int, world_size: int) -> None:
    """The ranks' shares together are the micro-batches of one rank, whatever their number."""
    sequences = cut(texts, number_characters(texts), 7)
    alone = deal(sequences, size, 0, 1)
    assert sum(weight for _, _, weight in alone) == sum(map(len, texts))
    for rank in range(world_size):
        share = deal(sequences, size, rank, world_size)
        for (inputs, targets, weight), expected in zip(share, alone[rank::world_size], strict=True):
            assert torch.equal(inputs, expected[0])
            assert torch.equal(targets, expected[1])
            assert weight == expected[2]


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    """Other draws from the global generator don't move it; another epoch or seed does."""

    def order(seed: int, epoch: int) -> list[list[int]]:
        torch.rand(1)
        batches = RankBatches(50, 4, seed=seed, rank=0, world_size=1)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)


def test_without_a_path_it_is_the_help_texts_of_python() -> None:
    """Whole documents of uneven length; the bigram's 2.46 nats refer to this text."""
    texts = read_documents(None)
    assert len(texts) > 50
    assert sum(map(len, texts)) > 300_000
    assert max(map(len, texts)) > 100 * min(map(len, texts))


def test_a_folder_is_read_by_name_and_with_its_folders(tmp_path: Path) -> None:
    """Each file is a document, in the order of the paths; empty and hidden ones are none."""
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": "two", "a.md": "öne", "sub/c": "three", "empty": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert read_documents(tmp_path) == ["öne", "two", "three"]
    assert read_documents(tmp_path / "b.txt") == ["two"]


def test_a_jsonl_gives_the_field_text_of_each_line(tmp_path: Path) -> None:
    """Blank lines are passed over; separators that only str.splitlines knows stay in the text."""
    path = tmp_path / "a.jsonl"
    lines = [{"text": "one\u2028still one", "id": 1}, {"text": "two"}]
    path.write_text(
        "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8"
    )
    assert read_documents(path) == ["one\u2028still one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\nnot json', "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"other": "x"}', "a.jsonl, line 1: not a JSON object with a field text"),
        ("a.jsonl", b'["text"]', "a.jsonl, line 1: not a JSON object"),
        ("a.jsonl", b'{"text": 3}', "a.jsonl, line 1: the field text is not a string"),
        ("a.jsonl", b"", "a.jsonl holds no text"),
        ("a.txt", b"\xff\xfe\x00", "a.txt can't be read as UTF-8 text"),
    ],
)
def test_what_is_not_text_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """The error says which file, which line, and what is wrong with it."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path / name)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    """A path that isn't there, and a folder without text."""
    with pytest.raises(ValueError, match="nowhere does not exist"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no text"):
        read_documents(tmp_path)


def test_a_prediction_sees_no_later_character() -> None:
    """Changing the last inputs leaves the logits before them as they are, and only those."""
    model = LanguageModel(20).eval()
    inputs = torch.randint(20, (2, 30))
    changed = inputs.clone()
    changed[:, 21:] = (changed[:, 21:] + 1) % 20
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :21], after[:, :21])
    assert not torch.allclose(before[:, 21:], after[:, 21:])


def test_padding_does_not_change_the_loss_of_a_sequence() -> None:
    """The nats of two sequences of 9 and 4 characters together are those of each alone, and
    those of the definition, minus the log of the softmax at the target."""
    model = LanguageModel(20).double()
    sequences = [torch.randint(1, 20, (10,)), torch.randint(1, 20, (5,))]
    (together,) = nats(model, [collate(sequences)])
    expected = 0.0
    for sequence in sequences:
        logits = model(sequence[None, :-1])[0]
        for scores, target in zip(logits, sequence[1:], strict=True):
            expected += (torch.logsumexp(scores, 0) - scores[target]).item()
    assert together == pytest.approx(expected, rel=1e-12)


def test_the_learning_rate_warms_up_then_decays() -> None:
    """300 updates: a straight line over 20, the peak, the middle of the cosine, a twentieth."""
    shares = [warm_up_and_decay(update, 300) for update in range(301)]
    assert shares[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert shares[20] == 1.0
    assert shares[160] == pytest.approx(0.525)
    assert shares[300] == pytest.approx(0.05)
    assert shares[20:] == sorted(shares[20:], reverse=True)
    assert warm_up_and_decay(0, 1) == 1.0
