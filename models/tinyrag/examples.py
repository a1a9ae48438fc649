"""Training and evaluation examples: a context of documents with many questions about it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from models.tinyrag import lexicon
from models.tinyrag.chunking import Chunk, cut
from models.tinyrag.handbook import (
    ABSENT_ANSWER,
    KINDS,
    Document,
    Kind,
    Question,
    Split,
    ask_absent,
    ask_single,
    ask_two_step,
    dependency_pairs,
    make_handbook,
    plain_attributes,
)
from models.tinyrag.lexicon import BY_KEY, DEPENDENCY
from models.tinyrag.prompt import chunk_ids, frame
from models.tinyrag.vocabulary import END

IGNORED = -1
SLOT_SIZES = tuple(len(pieces) for pieces in lexicon.NAME_SLOTS)
SLOTS = len(SLOT_SIZES)
QUESTION_TOKENS = 40  # question, answer and the tags around them
ATTRIBUTE_IDS = {key: index + 1 for index, key in enumerate(BY_KEY)}  # 0: no value here

_ANSWERED: tuple[Kind, ...] = ("single", "two_step")

Ints = npt.NDArray[np.int64]


ValuePositions = dict[tuple[str, str], list[int]]
"""(service, attribute) to the context positions where its value starts."""

NOWHERE = 0
"""The position to look at when nothing in the documents matches: the prompt's first token."""


_PIECE_IDS = tuple(
    {piece: index for index, piece in enumerate(pieces)} for pieces in lexicon.NAME_SLOTS
)


@lru_cache(maxsize=100_000)
def name_pieces(name: str) -> list[int]:
    """Indices of a service name's pieces in the lexicon's lists, one a slot."""
    match = lexicon.NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"not a service name: {name!r}")
    return [ids[piece] for ids, piece in zip(_PIECE_IDS, match.groups(), strict=True)]


@dataclass(frozen=True)
class Scene:
    """Documents as they stand in one prompt, each cut into chunks."""

    documents: tuple[Document, ...]
    chunks: tuple[tuple[Chunk, ...], ...]


@dataclass(frozen=True)
class Example:
    """One context of C tokens and N questions of `QUESTION_TOKENS` (L) tokens each.

    Labels are `IGNORED` where there is nothing to learn. What is to be learned beyond the answer:
    which service and attribute a token is about, and where to look.
    """

    context: Ints
    """[C] token ids: the prompt up to the question."""
    subject: Ints
    """[C, SLOTS] name pieces of the service each token's page describes, once it has been named."""
    tag: Ints
    """[C] attribute id of the value a token is part of, 0 for none."""
    title: Ints
    """[C] position of the last token of the page's title."""
    questions: Ints
    """[N, L] token ids: question and answer, padded."""
    answers: Ints
    """[N, L] the next token, where it belongs to the answer."""
    asked_subject: Ints
    """[N, L, SLOTS] name pieces of the service to look up for the next token."""
    asked_tag: Ints
    """[N, L] attribute id to look up for the next token."""
    source: Ints
    """[N, L, 2] context positions the next token is copied from; a second where chunks overlap."""
    kinds: Ints
    """[N] index into `KINDS`."""


def stage_scene(rng: Random, split: Split, count: int, count_tokens: Callable[[str], int]) -> Scene:
    """`count` documents of a new handbook in random order, cut and trimmed like retrieved ones."""
    size = count + rng.randint(0, 2)
    handbook = make_handbook(rng.getrandbits(48), size, split, alike=rng.random() < 0.5)
    documents = rng.sample(handbook.documents, count)
    documents = [d.without_tail(rng.randint(1, 5)) if rng.random() < 0.1 else d for d in documents]
    chunk_tokens, overlap = rng.randint(64, 160), rng.randint(0, 1)
    chunks = tuple(tuple(cut(d, count_tokens, chunk_tokens, overlap)) for d in documents)
    return Scene(tuple(documents), chunks)


def ask(rng: Random, documents: Sequence[Document], split: Split, kind: Kind) -> Question | None:
    """A question of the kind, about an attribute several documents share where that is possible.

    None where no two of the documents allow a question in two steps.
    """
    if kind == "absent":
        attribute = rng.choice(list(rng.choice(documents).facts))
        return ask_absent(rng, documents, split, attribute)
    if kind == "single":
        document = rng.choice(documents)
        return ask_single(rng, document, rng.choice(list(document.facts)))
    pairs = dependency_pairs(documents)
    if not pairs:
        return None
    first, second = rng.choice(pairs)
    return ask_two_step(rng, first, second, rng.choice(plain_attributes(second)))


class Encoder:
    """Turns scenes and questions into token ids and labels."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END)
        self._head = frame(tokenizer, "")[0]
        self.count_tokens = lru_cache(maxsize=100_000)(self._count)

    def _count(self, text: str) -> int:
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode(
        self, rng: Random, scene: Scene, split: Split, questions: int, absent_share: float
    ) -> Example:
        """The scene with `questions` questions about it, about `absent_share` of them absent."""
        context, subject, tag, title, value_positions = self._context(scene)
        rows: list[tuple[Ints, ...]] = []
        kinds: list[int] = []
        while len(rows) < questions:
            kind: Kind = "absent" if rng.random() < absent_share else rng.choice(_ANSWERED)
            question = ask(rng, scene.documents, split, kind)
            if question is not None:
                rows.append(self._row(question, value_positions))
                kinds.append(KINDS.index(kind))
        asked, answers, asked_subject, asked_tag, source = (
            np.stack(column) for column in zip(*rows, strict=True)
        )
        return Example(
            context=context,
            subject=subject,
            tag=tag,
            title=title,
            questions=asked,
            answers=answers,
            asked_subject=asked_subject,
            asked_tag=asked_tag,
            source=source,
            kinds=np.array(kinds),
        )

    def _context(self, scene: Scene) -> tuple[Ints, Ints, Ints, Ints, ValuePositions]:
        """Ids and labels of the scene's chunks, and where its values start."""
        context = list(self._head)
        subject = [[IGNORED] * SLOTS] * len(context)
        tag = [IGNORED] * len(context)
        title = [IGNORED] * len(context)
        value_positions: ValuePositions = {}
        for document, chunks in zip(scene.documents, scene.chunks, strict=True):
            pieces = name_pieces(document.title)
            title_end = len(context) + self._count(f"# {document.title}") - 1
            for chunk in chunks:
                start = len(context)
                ids = chunk_ids(self._tokenizer, chunk.text)
                context += ids
                tag += [0] * len(ids)
                for position in range(start, len(context)):
                    subject.append(pieces if position >= title_end else [IGNORED] * SLOTS)
                    title.append(title_end if position > title_end else IGNORED)
                for stated in chunk.stated:
                    first = start + self._count(chunk.text[: stated.start].rstrip(" "))
                    last = start + self._count(chunk.text[: stated.start + len(stated.value)])
                    value_positions.setdefault((document.title, stated.attribute), []).append(first)
                    tag[first:last] = [ATTRIBUTE_IDS[stated.attribute]] * (last - first)
        return np.array(context), np.array(subject), np.array(tag), np.array(title), value_positions

    def _row(
        self, question: Question, value_positions: ValuePositions
    ) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Ids and labels of one question."""
        prefix = frame(self._tokenizer, question.text)[1]
        ids = np.zeros(QUESTION_TOKENS, np.int64)
        answers = np.full(QUESTION_TOKENS, IGNORED)
        subject = np.full((QUESTION_TOKENS, SLOTS), IGNORED)
        tag = np.full(QUESTION_TOKENS, IGNORED)
        source = np.full((QUESTION_TOKENS, 2), IGNORED)
        ids[: len(prefix)] = prefix
        at = len(prefix) - 1  # the token that predicts the next one of the answer
        for text, lookup, copied in _segments(question):
            tokens = [self._end] if text == END else self._ids(text)
            starts = (
                [NOWHERE] if text == ABSENT_ANSWER else value_positions[lookup] if copied else []
            )
            for offset, token in enumerate(tokens):
                answers[at] = token
                ids[at + 1] = token
                subject[at] = name_pieces(lookup[0])
                tag[at] = ATTRIBUTE_IDS[lookup[1]]
                if text != ABSENT_ANSWER or offset == 0:
                    source[at, : len(starts)] = [start + offset for start in starts[:2]]
                at += 1
            if copied:
                # The token after a copied value is not copied, but what follows the value in the
                # document (a full stop, "and") is what says that it ends.
                source[at, : len(starts)] = [start + len(tokens) for start in starts[:2]]
        return ids, answers, subject, tag, source


def _segments(question: Question) -> Iterator[tuple[str, tuple[str, str], bool]]:
    """The answer in parts: text, the (service, attribute) looked up for it, whether copied."""
    if question.kind == "two_step":
        middle, tail = question.answer.split(", ", 1)
        bridge = BY_KEY[question.attribute].bridge
        final = (middle, question.attribute)
        yield middle, (question.subject, DEPENDENCY), True
        yield ",", (question.subject, DEPENDENCY), False
        yield f" {bridge}", final, False
        yield tail.removeprefix(bridge), final, True
        yield END, final, False
    else:
        lookup = (question.subject, DEPENDENCY if question.indirect else question.attribute)
        yield question.answer, lookup, question.kind == "single"
        yield END, lookup, False
