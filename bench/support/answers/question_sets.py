"""Sets of documents with questions whose answers are known: made manuals and public data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.support.blending.scores import normalized_words

XQUAD = Path("xquad_en", "xquad.en.json")
MUSIQUE = Path("hipporag", "musique_train.json")
CACHE_BLEND = Path("cacheblend", "musique_s.json")

MANUAL_CHUNK_TOKENS = 64
"""Manuals are short here. With these chunks they are divided as long ones are with usual ones."""

_MACHINES = (
    ("laser marker", "K7", "Q9"),
    ("belt sander", "B210", "B340"),
    ("label printer", "Tara", "Mira"),
    ("air compressor", "C15", "C22"),
    ("band saw", "Ostra", "Velta"),
    ("water pump", "P4", "P8"),
    ("paint mixer", "M60", "M95"),
    ("glass cutter", "Rondo", "Largo"),
)
_SECTIONS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    # Title, fact, question of a machine, question of a value, and values
    (
        "Electrical data",
        "The main fuse is rated {value}. The plug must be earthed. The cable is kept dry.",
        "How is the main fuse of the {kind} {name} rated?",
        "Which {kind} has a main fuse rated {value}?",
        ("10 A", "16 A", "25 A", "32 A"),
    ),
    (
        "Environment",
        "The noise level is {value}. The room must be dry. Dust shortens the life of all parts.",
        "What is the noise level of the {kind} {name}?",
        "Which {kind} has a noise level of {value}?",
        ("58 dB", "61 dB", "74 dB", "83 dB"),
    ),
    (
        "Transport",
        "The weight is {value}. Two persons carry it. It stays upright on the way.",
        "What is the weight of the {kind} {name}?",
        "Which {kind} has a weight of {value}?",
        ("35 kg", "48 kg", "92 kg", "120 kg"),
    ),
    (
        "Upkeep",
        "The oil is changed every {value}. Old oil is waste. The filter is changed with it.",
        "How often is the oil of the {kind} {name} changed?",
        "Which {kind} has its oil changed every {value}?",
        ("200 hours", "350 hours", "500 hours", "900 hours"),
    ),
)
_COMMON = (
    (
        "Safety",
        "Wear goggles. Keep your hands away from moving parts. Only trained staff may open it.",
    ),
    ("Cleaning", "Stop it before you clean it. Use a dry cloth. No water may reach the cabinet."),
    ("Waste", "Used parts are returned to the dealer. Batteries are collected apart from them."),
)


@dataclass(frozen=True, slots=True)
class KnownDocument:
    """A document to ingest. An empty title is not sent."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class KnownQuestion:
    """A question with its right answers, and with answers of other documents that are wrong."""

    text: str
    right: tuple[str, ...]
    wrong: tuple[str, ...] = ()

    def is_right(self, answer: str) -> bool:
        """Whether an answer has the words of a right answer, and of no wrong one."""
        words = normalized_words(answer)
        return any(_has(words, one) for one in self.right) and not any(
            _has(words, one) for one in self.wrong
        )


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Documents and questions about them.

    ``chunk_tokens`` is the size of its chunks where no setting names one; None: the platform's.
    """

    name: str
    documents: tuple[KnownDocument, ...]
    questions: tuple[KnownQuestion, ...]
    chunk_tokens: int | None = None


def _has(words: Sequence[str], phrase: str) -> bool:
    wanted = normalized_words(phrase)
    return bool(wanted) and any(
        list(words[i : i + len(wanted)]) == wanted for i in range(len(words) - len(wanted) + 1)
    )


def make_manuals(count: int, rng: Random) -> QuestionSet:
    """Make pairs of manuals of one form, which differ in name and values, and questions on them.

    Only the title names the machine, as in manuals where each page has a section of its own.
    """
    documents, questions = [], []
    for kind, *names in rng.sample(_MACHINES, len(_MACHINES)):
        values = {title: rng.sample(choices, len(names)) for title, *_, choices in _SECTIONS}
        order = rng.sample(range(len(_SECTIONS)), len(_SECTIONS))
        for i, name in enumerate(names):
            parts = [f"# {kind.capitalize()} {name}\n\nRead this manual before the first use."]
            for j in order:
                title, fact, *_ = _SECTIONS[j]
                parts.append(f"## {title}\n\n{fact.format(value=values[title][i])}")
                if j < len(_COMMON):
                    parts.append("## {}\n\n{}".format(*_COMMON[j]))
            document_id = f"{kind}-{name}.md".replace(" ", "-").lower()
            documents.append(KnownDocument(document_id, "", "\n\n".join(parts) + "\n"))
            for title, _, of_machine, of_value, _ in _SECTIONS:
                value = values[title][i]
                questions += [
                    KnownQuestion(
                        of_machine.format(kind=kind, name=name), (value,), (values[title][1 - i],)
                    ),
                    KnownQuestion(
                        of_value.format(kind=kind, value=value), (name,), (names[1 - i],)
                    ),
                ]
    drawn = _drawn(questions, count, rng)
    return QuestionSet("manuals", tuple(documents), drawn, MANUAL_CHUNK_TOKENS)


def read_xquad(data: Path, count: int, rng: Random) -> QuestionSet:
    """Return the articles of XQuAD, each one document, and questions on them."""
    content = json.loads((data / XQUAD).read_text())
    documents, questions = [], []
    for i, article in enumerate(content["data"]):
        title = article["title"].replace("_", " ")
        text = "\n\n".join(one["context"] for one in article["paragraphs"])
        documents.append(KnownDocument(str(i), title, text))
        questions += [
            KnownQuestion(asked["question"], tuple(one["text"] for one in asked["answers"]))
            for one in article["paragraphs"]
            for asked in one["qas"]
        ]
    return QuestionSet("xquad", tuple(documents), _drawn(questions, count, rng))


def read_musique(data: Path, count: int, rng: Random) -> QuestionSet:
    """Return questions of MuSiQue and all their paragraphs, each a document with its title."""
    drawn = _drawn(json.loads((data / MUSIQUE).read_text()), count, rng)
    documents: dict[tuple[str, str], KnownDocument] = {}
    questions = []
    for one in drawn:
        for part in one["paragraphs"]:
            title, text = part["title"], part["paragraph_text"]
            known = KnownDocument(str(len(documents)), title, text)
            documents.setdefault((title, text), known)
        right = (one["answer"], *one.get("answer_aliases", ()))
        questions.append(KnownQuestion(one["question"], right))
    return QuestionSet("musique", tuple(documents.values()), tuple(questions))


def read_cache_blend(data: Path, count: int, rng: Random) -> QuestionSet:
    """Return CacheBlend's questions of MuSiQue and their contexts, which have no titles."""
    drawn = _drawn(json.loads((data / CACHE_BLEND).read_text()), count, rng)
    texts = dict.fromkeys(part["text"] for one in drawn for part in one["ctxs"])
    documents = [KnownDocument(str(i), "", text) for i, text in enumerate(texts)]
    questions = [KnownQuestion(one["question"], tuple(one["answers"])) for one in drawn]
    return QuestionSet("cacheblend", tuple(documents), tuple(questions))


def _drawn(items: Sequence[Any], count: int, rng: Random) -> tuple[Any, ...]:
    return tuple(rng.sample(items, min(count, len(items))))


@dataclass(frozen=True, slots=True)
class SetSource:
    """Where a set is from. ``file``: what it needs of the data folder; None: it is made."""

    make: Callable[[Path, int, Random], QuestionSet]
    file: Path | None = field(default=None)


SOURCES: Mapping[str, SetSource] = {
    "manuals": SetSource(lambda _, count, rng: make_manuals(count, rng)),
    "xquad": SetSource(read_xquad, XQUAD),
    "musique": SetSource(read_musique, MUSIQUE),
    "cacheblend": SetSource(read_cache_blend, CACHE_BLEND),
}
