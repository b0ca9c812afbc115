"""Text for the training recipes: documents, cut into sequences, and who reads which.

A character is the unit of everything: the model predicts each character of a document from
those before it, and the weight of a micro-batch is how many it predicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

START = 0
"""The id that stands before a document, and fills up inputs; no character has it."""
IGNORED = -100
"""Fills up targets; `cross_entropy` leaves it out by default."""

MicroBatch = tuple[Tensor, Tensor, int]


def read_documents(path: Path | None) -> list[str]:
    """Read a folder of text files, one text file, or a .jsonl with a field `text` in each line.

    Without a path: the texts of the standard library's own help system, 79 of them, about
    465 000 characters. The order is that of the names, or of the lines.

    Raises:
        ValueError: there is nothing to read, or it is not text; the message names the place.
    """
    if path is None:
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.suffix == ".jsonl":
        found = list(_read_jsonl(path))
    else:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        found = [_read_text(file) for file in files if file.is_file() and file.name[0] != "."]
    documents = [text for text in found if text]
    if not documents:
        raise ValueError(f"{path} holds no text")
    return documents


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{file} can't be read as UTF-8 text: {error}") from error


def _read_jsonl(file: Path) -> Iterator[str]:
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{file}, line {number}: not a JSON object with a field text"
            ) from None
        if not isinstance(text, str):
            raise ValueError(f"{file}, line {number}: the field text is not a string")
        yield text


def hold_out(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into documents to train on and documents held out: every tenth, from the first on.

    A single document is cut instead, and its last tenth held out.

    Raises:
        ValueError: one character is all there is.
    """
    if len(documents) > 1:
        return [d for i, d in enumerate(documents) if i % 10], list(documents[::10])
    (text,) = documents
    if len(text) < 2:
        raise ValueError("one character of text is not enough to train on and to hold out")
    end = len(text) - max(1, len(text) // 10)
    return [text[:end]], [text[end:]]


def number_characters(documents: Iterable[str]) -> dict[str, int]:
    """Give each character that occurs an id, from 1 on."""
    return {character: i for i, character in enumerate(sorted(set().union(*documents)), start=1)}


def cut(documents: Iterable[str], ids: dict[str, int], length: int) -> list[Tensor]:
    """Cut each document into sequences that predict `length` characters; the last one fewer.

    A sequence of n targets has n + 1 ids: the character before them (`START` for the first of a
    document), then the targets. Each character of each document is a target exactly once.
    """
    sequences = []
    for document in documents:
        whole = torch.tensor([START, *(ids[character] for character in document)])
        for begin in range(0, len(document), length):
            sequences.append(whole[begin : begin + length + 1])
    return sequences


def collate(sequences: Sequence[Tensor]) -> MicroBatch:
    """Fill sequences up to the longest: inputs, targets (both sequences x characters), and how
    many targets are real. That number is the micro-batch's weight."""
    inputs = pad_sequence([s[:-1] for s in sequences], batch_first=True, padding_value=START)
    targets = pad_sequence([s[1:] for s in sequences], batch_first=True, padding_value=IGNORED)
    return inputs, targets, sum(len(s) - 1 for s in sequences)


def deal(sequences: Sequence[Tensor], size: int, rank: int, world_size: int) -> list[MicroBatch]:
    """One rank's share of `sequences`: micro-batches of `size` in their order, every ranks-th."""
    begins = range(rank * size, len(sequences), world_size * size)
    return [collate(sequences[begin : begin + size]) for begin in begins]


class RankBatches(Sampler[list[int]]):
    """The micro-batches of one rank: those of the epoch's order, dealt out in turn.

    Nothing is repeated or left out when their number doesn't divide by the ranks; some ranks
    then have one micro-batch more. The order is a function of seed and epoch alone.
    """

    def __init__(self, items: int, size: int, *, seed: int, rank: int, world_size: int) -> None:
        self.items = items
        self.size = size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch for the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.items, generator=generator).tolist()
        for begin in self._begins():
            yield order[begin : begin + self.size]

    def __len__(self) -> int:
        return len(self._begins())

    def _begins(self) -> range:
        return range(self.rank * self.size, self.items, self.world_size * self.size)
