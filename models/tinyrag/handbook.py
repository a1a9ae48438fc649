"""Seeded generator of an invented company's service handbook, and of questions about it.

A document describes one service. Its title and opening sentence name the service; every other
sentence says "it", so what a later chunk means depends on what stands before it. Everything is a
pure function of the seed. Standard library only.

    python models/tinyrag/handbook.py --seed 7 --documents 200 --out DIR --questions FILE.jsonl
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Literal

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.tinyrag import lexicon
from models.tinyrag.lexicon import ATTRIBUTES, BY_KEY, DEPENDENCY

Split = Literal["train", "held_out"]
Slots = Sequence[Sequence[str]]
"""Pieces for each part of a name: head, tail, second word."""
Kind = Literal["single", "two_step", "absent"]
KINDS: tuple[Kind, ...] = ("single", "two_step", "absent")

ABSENT_ANSWER = "not in the documents"
_HELD_OUT_SHARE = 8  # one name combination in this many is never trained on
_MAX_CALLERS = 2


@dataclass(frozen=True)
class Service:
    """One service: the truth a document is written from."""

    name: str
    purpose: str
    facts: dict[str, str]
    """Attribute key to value; some attributes have none."""
    callers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stated:
    """A value inside a sentence: `sentence.text[start:start + len(value)] == value`."""

    attribute: str
    value: str
    start: int


@dataclass(frozen=True)
class Sentence:
    """One sentence and the facts it states."""

    text: str
    stated: tuple[Stated, ...] = ()


@dataclass(frozen=True)
class Document:
    """A handbook page. `id` is a file stem, `title` the service's name."""

    id: str
    title: str
    paragraphs: tuple[tuple[Sentence, ...], ...]

    @property
    def text(self) -> str:
        """The page as Markdown: heading, then paragraphs parted by blank lines."""
        body = (" ".join(s.text for s in paragraph) for paragraph in self.paragraphs)
        return "\n\n".join([f"# {self.title}", *body])

    @cached_property
    def facts(self) -> dict[str, str]:
        """Attribute key to stated value."""
        return {st.attribute: st.value for p in self.paragraphs for s in p for st in s.stated}

    @cached_property
    def early(self) -> frozenset[str]:
        """Attributes stated in the first paragraph, which also names the service."""
        return frozenset(st.attribute for s in self.paragraphs[0] for st in s.stated)

    def without_tail(self, sentences: int) -> "Document":
        """The page with its last `sentences` sentences missing (the first paragraph stays)."""
        kept = [self.paragraphs[0]]
        left = max(0, sum(len(p) for p in self.paragraphs[1:]) - sentences)
        for paragraph in self.paragraphs[1:]:
            if left > 0:
                kept.append(paragraph[:left])
                left -= len(kept[-1])
        return replace(self, paragraphs=tuple(kept))


@dataclass(frozen=True)
class Question:
    """A question with its one right answer.

    `subject` is the service that the question names. `supports` has the ids of the documents with
    the answer, or none. `needs_earlier_chunk` is set if the fact is stated after the first
    paragraph of its page, where the service is only "it".
    """

    kind: Kind
    text: str
    answer: str
    attribute: str
    subject: str
    supports: tuple[str, ...] = ()
    needs_earlier_chunk: bool = False
    indirect: bool = False
    """Asked about the dependency of `subject`, answered or not."""


@dataclass(frozen=True)
class Handbook:
    """All services of one seed and their pages, in the same order."""

    seed: int
    services: tuple[Service, ...]
    documents: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """Whether a service name is in the held-out split; a fixed property of the name."""
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def draw_name(rng: Random, split: Split, slots: Slots = lexicon.NAME_SLOTS) -> str:
    """A two-word service name of the given split, such as "Kelvane Torrin".

    slots: the pieces to choose from; they must allow for names of the split.
    """
    while True:
        head, tail, second = (rng.choice(pieces) for pieces in slots)
        name = f"{head}{tail} {second}"
        if is_held_out(name) == (split == "held_out"):
            return name


def _few_pieces(rng: Random) -> Slots:
    """Pieces for some 40 held-out names, each like several of the others."""
    return tuple(
        rng.sample(pieces, few) for pieces, few in zip(lexicon.NAME_SLOTS, (4, 8, 10), strict=True)
    )


def make_handbook(seed: int, size: int, split: Split, *, alike: bool = False) -> Handbook:
    """A handbook of `size` services with names of `split`; the same arguments, the same handbook.

    About three services in four depend on another one of the handbook, whose page names its
    callers (at most two). `alike` makes the names of few pieces, so that they resemble each other
    as those that a search by name brings together do; for at most 16 services.
    """
    rng = Random(seed)
    slots = _few_pieces(rng) if alike else lexicon.NAME_SLOTS
    names: list[str] = []
    while len(names) < size:
        name = draw_name(rng, split, slots)
        if name not in names:
            names.append(name)
    callers: dict[str, list[str]] = {name: [] for name in names}
    dependency: dict[str, str] = {}
    for name in names:
        free = [n for n in names if n != name and len(callers[n]) < _MAX_CALLERS]
        if free and rng.random() < 0.75:
            dependency[name] = rng.choice(free)
            callers[dependency[name]].append(name)
    services = tuple(
        Service(
            name,
            rng.choice(lexicon.PURPOSES),
            _deal_facts(rng, dependency.get(name)),
            tuple(callers[name]),
        )
        for name in names
    )
    return Handbook(seed, services, tuple(write_document(rng, service) for service in services))


def _deal_facts(rng: Random, dependency: str | None) -> dict[str, str]:
    plain = [attribute for attribute in ATTRIBUTES if attribute.key != DEPENDENCY]
    facts = {a.key: a.draw(rng) for a in rng.sample(plain, rng.randint(8, 13))}
    if dependency:
        facts[DEPENDENCY] = dependency
    return facts


def write_document(rng: Random, service: Service) -> Document:
    """The service's page: two or three paragraphs, the name only in the title and the opener."""
    opener = rng.choice(lexicon.OPENERS).format(name=service.name, purpose=service.purpose)
    sentences = [_state(rng, chunk, service.facts) for chunk in _portions(rng, service.facts)]
    sentences += [
        Sentence(text) for text in rng.sample(lexicon.FILLERS, rng.choice((0, 1, 1, 2, 3)))
    ]
    rng.shuffle(sentences)
    if service.callers:
        names = " and ".join(service.callers)
        line = Sentence(rng.choice(lexicon.CALLERS).format(names=names))
        sentences.insert(rng.randint(0, 2), line)
    first = rng.randint(3, 4)
    paragraphs = [(Sentence(opener), *sentences[:first])]
    rest = sentences[first:]
    cut = rng.randint(3, max(3, len(rest) - 2))
    paragraphs += [tuple(part) for part in (rest[:cut], rest[cut:]) if part]
    return Document(service.name.lower().replace(" ", "-"), service.name, tuple(paragraphs))


def _portions(rng: Random, keys: Iterable[str]) -> list[tuple[str, ...]]:
    """Deals attribute keys into sentences of one fact, now and then of two."""
    left = list(keys)
    rng.shuffle(left)
    portions = []
    while left:
        count = 2 if len(left) > 1 and rng.random() < 0.2 else 1
        portions.append(tuple(left[:count]))
        del left[:count]
    return portions


def _state(rng: Random, keys: tuple[str, ...], facts: dict[str, str]) -> Sentence:
    """One sentence that states the given attributes of "it"."""
    if len(keys) == 1 and rng.random() < 0.35:
        parts = ["Its " + rng.choice(BY_KEY[keys[0]].possessives)]
    else:
        prefixed = rng.random() < 0.15
        subject = rng.choice(lexicon.PREFIXES if prefixed else lexicon.SUBJECTS)
        parts = [rng.choice(BY_KEY[key].predicates) for key in keys]
        parts[0] = f"{subject} {parts[0]}"
    text = ""
    stated = []
    for key, part in zip(keys, parts, strict=True):
        text += " and " if text else ""
        before, after = part.split("{v}")
        stated.append(Stated(key, facts[key], len(text) + len(before)))
        text += before + facts[key] + after
    return Sentence(text + ".", tuple(stated))


def ask_single(rng: Random, document: Document, attribute: str) -> Question:
    """Asks for an attribute that `document` states."""
    return Question(
        "single",
        _wording(rng, attribute, document.title),
        document.facts[attribute],
        attribute,
        document.title,
        (document.id,),
        attribute not in document.early,
    )


def ask_two_step(rng: Random, first: Document, second: Document, attribute: str) -> Question:
    """Asks for an attribute of the service that `first` depends on, described by `second`.

    The answer names that service before the value, so that each step is written down.
    """
    if first.facts[DEPENDENCY] != second.title:
        raise ValueError(f"{first.title} does not depend on {second.title}")
    reference = rng.choice(lexicon.REFERENCES).format(name=first.title)
    return Question(
        "two_step",
        _wording(rng, attribute, reference),
        f"{second.title}, {BY_KEY[attribute].bridge} {second.facts[attribute]}",
        attribute,
        first.title,
        (first.id, second.id),
        attribute not in second.early,
        indirect=True,
    )


def ask_absent(
    rng: Random, documents: Sequence[Document], split: Split, attribute: str | None = None
) -> Question:
    """Asks what none of `documents` says.

    Either the service has no page among them, or its page does not state the attribute, or (for a
    question in two steps) it states no dependency. `attribute` is drawn where it is not given.
    """
    key = attribute or rng.choice(ATTRIBUTES).key
    two_step = rng.random() < 0.25 and key != DEPENDENCY
    needed = DEPENDENCY if two_step else key
    silent = [d.title for d in documents if needed not in d.facts]
    if silent and rng.random() < 0.6:
        name = rng.choice(silent)
    else:
        name = _unknown_name(rng, documents, split)
    subject = rng.choice(lexicon.REFERENCES).format(name=name) if two_step else name
    return Question(
        "absent", _wording(rng, key, subject), ABSENT_ANSWER, key, name, indirect=two_step
    )


def _unknown_name(rng: Random, documents: Sequence[Document], split: Split) -> str:
    """A service without a page.

    Half of the time one that a page mentions, if there is any; else half of the time one made of
    pieces of the titles, so that it resembles them.
    """
    titles = {document.title for document in documents}
    mentioned = [
        d.facts[DEPENDENCY]
        for d in documents
        if DEPENDENCY in d.facts and d.facts[DEPENDENCY] not in titles
    ]
    if mentioned and rng.random() < 0.5:
        return rng.choice(mentioned)
    # Pieces of few titles may allow for no other name of the split; all pieces always do.
    slots = _pieces_of(titles) if len(titles) > 3 and rng.random() < 0.5 else lexicon.NAME_SLOTS
    while (name := draw_name(rng, split, slots)) in titles:
        slots = lexicon.NAME_SLOTS
    return name


def _pieces_of(names: Collection[str]) -> Slots:
    matches = [match for name in sorted(names) if (match := lexicon.NAME.fullmatch(name))]
    return tuple(zip(*(match.groups() for match in matches), strict=True))


def _wording(rng: Random, attribute: str, subject: str) -> str:
    return rng.choice(BY_KEY[attribute].questions).format(s=subject)


def dependency_pairs(documents: Collection[Document]) -> list[tuple[Document, Document]]:
    """Pairs (document, document of the service it depends on) that are both among `documents`."""
    by_title = {document.title: document for document in documents}
    return [
        (document, by_title[document.facts[DEPENDENCY]])
        for document in documents
        if document.facts.get(DEPENDENCY) in by_title
    ]


def plain_attributes(document: Document) -> list[str]:
    """The attributes a document states, without the dependency."""
    return [key for key in document.facts if key != DEPENDENCY]


def sample_questions(handbook: Handbook, per_kind: int, split: Split) -> list[Question]:
    """Questions about the whole handbook, `per_kind` of each kind, drawn from its seed."""
    rng = Random(f"questions {handbook.seed}")
    documents = handbook.documents
    pairs = dependency_pairs(documents)
    questions = []
    for _ in range(per_kind):
        document = rng.choice(documents)
        questions.append(ask_single(rng, document, rng.choice(list(document.facts))))
        if pairs:
            first, second = rng.choice(pairs)
            attribute = rng.choice(plain_attributes(second))
            questions.append(ask_two_step(rng, first, second, attribute))
        questions.append(ask_absent(rng, documents, split))
    return questions


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write a sample handbook as Markdown files.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True, help="folder for the .md files")
    parser.add_argument("--questions", type=Path, help="also write questions, one JSON a line")
    args = parser.parse_args()
    handbook = make_handbook(args.seed, args.documents, "held_out")
    args.out.mkdir(parents=True, exist_ok=True)
    for document in handbook.documents:
        (args.out / f"{document.id}.md").write_text(document.text + "\n", encoding="utf-8")
    if args.questions:
        questions = sample_questions(handbook, args.documents, "held_out")
        lines = (json.dumps(asdict(question)) + "\n" for question in questions)
        args.questions.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
