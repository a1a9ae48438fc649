"""Endless training batches, harder level by level."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from models.tinyrag.examples import IGNORED, QUESTION_TOKENS, Encoder, Example, stage_scene
from models.tinyrag.handbook import Split
from models.tinyrag.model import Batch
from models.tinyrag.vocabulary import build_tokenizer

QUESTIONS = 16
"""Questions a context."""
TOKENS_A_STEP = 9000
CONTEXT_STEP = 256  # contexts are padded to multiples, so that few shapes are compiled
DOCUMENT_TOKENS = 160  # more than most documents have, chunk overlaps included


@dataclass(frozen=True)
class Level:
    """How hard the batches are: documents of a context, and how many questions are absent.

    `usual` documents are in half of the contexts; in the others any number up to `most`.
    """

    fewest: int
    usual: int
    most: int
    absent_share: float


LEVELS = (Level(2, 3, 3, 0.2), Level(2, 5, 5, 0.2), Level(3, 8, 8, 0.2), Level(1, 8, 12, 0.5))


def collate(examples: list[Example], width: int) -> Batch:
    """Stacks examples, their contexts padded to `width` tokens."""
    lengths = [len(example.context) for example in examples]

    def padded(name: str, fill: int) -> Tensor:
        rows = [getattr(example, name) for example in examples]
        widths = [[(0, width - len(row))] + [(0, 0)] * (row.ndim - 1) for row in rows]
        stacked = [np.pad(r, w, constant_values=fill) for r, w in zip(rows, widths, strict=True)]
        return torch.from_numpy(np.stack(stacked))

    by_token = {"context": 0, "subject": IGNORED, "tag": IGNORED, "title": IGNORED}
    columns = {name: padded(name, fill) for name, fill in by_token.items()}
    for field in fields(Example):
        if field.name not in columns:
            columns[field.name] = torch.from_numpy(
                np.stack([getattr(example, field.name) for example in examples])
            )
    return Batch(**columns, lengths=torch.tensor(lengths))


def make_batch(
    encoder: Encoder, rng: Random, split: Split, documents: int, absent_share: float
) -> Batch:
    """As many contexts of `documents` documents as make up a step.

    Contexts too long for the width this number of documents calls for are drawn again: few fixed
    shapes compile once.
    """
    width = max(2, round((40 + documents * DOCUMENT_TOKENS) / CONTEXT_STEP)) * CONTEXT_STEP
    size = max(1, TOKENS_A_STEP // (width + QUESTIONS * QUESTION_TOKENS))
    examples: list[Example] = []
    while len(examples) < size:
        scene = stage_scene(rng, split, documents, encoder.count_tokens)
        example = encoder.encode(rng, scene, split, QUESTIONS, absent_share)
        if len(example.context) <= width:
            examples.append(example)
    return collate(examples, width)


class Lessons(IterableDataset[tuple[int, Batch]]):
    """Endless training batches of one level, each with its number of documents."""

    def __init__(self, level: Level, seed: int) -> None:
        self._level = level
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        torch.set_num_threads(1)
        encoder = Encoder(build_tokenizer())
        rng = Random(self._seed)
        level = self._level
        while True:
            count = rng.randint(level.fewest, level.most) if rng.random() < 0.5 else level.usual
            yield count, make_batch(encoder, rng, "train", count, level.absent_share)


def lessons(level: Level, seed: int) -> Iterator[tuple[int, Batch]]:
    """`Lessons` made by another process while this one learns."""
    loader = DataLoader(Lessons(level, seed), batch_size=None, num_workers=1, prefetch_factor=4)
    return iter(loader)
