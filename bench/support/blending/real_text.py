"""Questions over real paragraphs: MuSiQue, XQuAD, or the standard library's own documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from examples.pydoc_pages import render
from ragcache_core.background.capture_sequence import SEQUENCE_TOKENS, context_size, fitting_chunks

PARAGRAPHS = 8
"""Paragraphs of a prompt."""

MUSIQUE, XQUAD = Path("hipporag", "musique_train.json"), Path("xquad_en", "xquad.en.json")

_LOCAL_MODULES = ("json", "csv", "bisect", "heapq", "textwrap", "shutil", "tempfile", "statistics")
_MIN_CHARS, _MAX_CHARS = 200, 1200
"""Of a paragraph of documentation."""


@dataclass(frozen=True, slots=True)
class RealQuestion:
    """A question, its paragraphs in random order, and right answers (none: unknown)."""

    text: str
    paragraphs: tuple[str, ...]
    right: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RealTexts:
    """Questions, documents as lists of paragraphs in their order, and where they are from."""

    questions: tuple[RealQuestion, ...]
    documents: tuple[tuple[str, ...], ...]
    source: str

    def others(self, question: RealQuestion) -> list[str]:
        """Return the paragraphs that are not in a question's prompt."""
        own = set(question.paragraphs)
        return [one for document in self.documents for one in document if one not in own]


def read_real_texts(data: Path, count: int, rng: Random) -> RealTexts:
    """Return questions of MuSiQue and XQuAD in turn; of local documentation without this data."""
    found = []
    if (data / MUSIQUE).is_file():
        found.append(musique(json.loads((data / MUSIQUE).read_text()), rng))
    if (data / XQUAD).is_file():
        found.append(xquad(json.loads((data / XQUAD).read_text()), rng))
    if not found:
        return _first(local_documentation(_LOCAL_MODULES, rng), count)
    merged = RealTexts(
        tuple(
            question
            for pair in zip_longest(*(texts.questions for texts in found))
            for question in pair
            if question is not None
        ),
        tuple(document for texts in found for document in texts.documents),
        " and ".join(texts.source for texts in found),
    )
    return _first(merged, count)


def musique(asked: Sequence[Any], rng: Random) -> RealTexts:
    """Return the questions of MuSiQue, each over its supporting paragraphs and others of it."""
    questions, documents = [], {}
    for one in rng.sample(asked, len(asked)):
        supporting = [p for p in one["paragraphs"] if p["is_supporting"]]
        others = [p for p in one["paragraphs"] if not p["is_supporting"]]
        drawn = supporting + rng.sample(others, PARAGRAPHS - len(supporting))
        rng.shuffle(drawn)
        questions.append(
            RealQuestion(
                one["question"],
                tuple(_titled(p["title"], p["paragraph_text"]) for p in drawn),
                (one["answer"], *one.get("answer_aliases", ())),
            )
        )
        for paragraph in one["paragraphs"]:
            text = _titled(paragraph["title"], paragraph["paragraph_text"])
            documents[text] = (text,)
    return RealTexts(tuple(questions), tuple(documents.values()), "MuSiQue")


def xquad(content: Any, rng: Random) -> RealTexts:
    """Return one question to each paragraph of XQuAD, over paragraphs of other articles too."""
    articles = [
        [(_titled(article["title"].replace("_", " "), p["context"]), p["qas"]) for p in paragraphs]
        for article in content["data"]
        for paragraphs in [article["paragraphs"]]
    ]
    every = [one for article in articles for one in article]
    questions = []
    for text, asked in rng.sample(every, len(every)):
        question = rng.choice(asked)
        others = [other for other, _ in every if other != text]
        drawn = [text, *rng.sample(others, PARAGRAPHS - 2)]  # they are longer than MuSiQue's
        rng.shuffle(drawn)
        right = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
        questions.append(RealQuestion(question["question"], tuple(drawn), right))
    documents = tuple(tuple(text for text, _ in article) for article in articles)
    return RealTexts(tuple(questions), documents, "XQuAD")


def local_documentation(modules: Sequence[str], rng: Random) -> RealTexts:
    """Return questions about functions of the standard library, over its documentation."""
    documents = []
    for name in modules:
        text = render(name) or ""
        paragraphs = tuple(_titled(name, part) for part in paragraphs_of(text))
        if paragraphs:
            documents.append(paragraphs)
    every = [one for document in documents for one in document]
    questions = []
    for text in rng.sample(every, len(every)):
        function = re.search(r"\b([a-z_]{4,})\(", text)
        if function is None:
            continue
        drawn = [text, *rng.sample([one for one in every if one != text], PARAGRAPHS - 1)]
        rng.shuffle(drawn)
        module = text.partition("\n")[0]
        asked = f"What does {function[1]} of the module {module} do?"
        questions.append(RealQuestion(asked, tuple(drawn), ()))
    return RealTexts(tuple(questions), tuple(documents), "documentation of Python")


def paragraphs_of(text: str) -> list[str]:
    """Cut a text at empty lines into paragraphs of a few hundred characters."""
    paragraphs, current = [], ""
    for part in re.split(r"\n\s*\n", text):
        if current and len(current) + len(part) > _MAX_CHARS:
            paragraphs.append(current)
            current = ""
        current = f"{current}\n\n{part}".strip("\n")[:_MAX_CHARS]
    paragraphs.append(current)
    return [one for one in paragraphs if len(one) >= _MIN_CHARS]


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text.strip()}"


def _first(texts: RealTexts, count: int) -> RealTexts:
    return RealTexts(texts.questions[:count], texts.documents, texts.source)


MAX_BEFORE = 4
"""Chunks before a captured one at most, besides the context. The gateway's sequences are longer;
these cost less and bring nearly the same."""


@dataclass(frozen=True, slots=True)
class AheadSequences:
    """All chunks, cut into sequences as the gateway cuts them.

    Attributes:
        context: The chunks before every sequence.
        before: By chunk, those before it in its sequence, first to last.
    """

    context: tuple[tuple[int, ...], ...]
    before: dict[tuple[int, ...], tuple[tuple[int, ...], ...]]

    def prefix_of(self, chunk: Sequence[int]) -> list[list[int]]:
        before = self.before[tuple(chunk)][-MAX_BEFORE:]
        return [list(ids) for ids in (*self.context, *before)]


def ahead_sequences(chunks: Sequence[Sequence[int]]) -> AheadSequences:
    """Cut chunks, in the order of their documents, into sequences.

    The context is the first chunks. They come again at the end of the first sequence, after the
    others.
    """
    left = [tuple(ids) for ids in chunks]
    context = left[: context_size([len(ids) for ids in left])]
    before: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
    is_first = True
    while left:
        room = SEQUENCE_TOKENS - (0 if is_first else sum(map(len, context)))
        sizes = [len(ids) for ids in left]
        count = fitting_chunks(sizes, room, is_first=is_first)
        sequence, left = left[:count], left[count:]
        if is_first:
            sequence = [*sequence[len(context) :], *context]
        for index, ids in enumerate(sequence):
            before.setdefault(ids, tuple(sequence[:index]))
        is_first = False
    return AheadSequences(tuple(context), before)
