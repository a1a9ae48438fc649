"""Questions for a quality measurement: from a file, or made from the user's documents."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from ragcache_core.errors import InvalidInput

MAX_QUESTION_CHARS = 2000

_HEADING = re.compile(r"^#{1,6}[ \t]+([^\r\n]{3,120})$", re.MULTILINE)
_SENTENCE = re.compile(r"[A-Z][^\n.!?]{30,300}[.!?](?=\s|$)")
_MAX_SCANNED_CHARS = 200_000


def read_questions(path: Path) -> list[str]:
    """Read one question a line, as text or as JSON with ``question``.

    Raises:
        InvalidInput: The file cannot be read, or has no question.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            "--questions", f"{path} cannot be read: {error}", "name a text file"
        ) from error
    questions = [
        _question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not questions:
        raise InvalidInput("--questions", f"{path} has no questions", "write one a line")
    return questions


def make_questions(documents: Sequence[tuple[str, str]], count: int, seed: int) -> list[str]:
    """Make questions from headings and first sentences of documents.

    Args:
        documents: Title and text of each.
        count: Most questions.
        seed: The same documents and seed give the same questions.
    """
    rng = random.Random(seed)
    by_document = [questions_of(title, text) for title, text in documents]
    for questions in by_document:
        rng.shuffle(questions)
    # One of each document, then a second one, so that a long document does not dominate.
    rounds = max(map(len, by_document), default=0)
    found = [
        questions[number]
        for number in range(rounds)
        for questions in by_document
        if number < len(questions)
    ]
    return list(dict.fromkeys(found))[:count]


def questions_of(title: str, text: str) -> list[str]:
    """Return a question for each heading of a document, or for its first sentences."""
    text = text[:_MAX_SCANNED_CHARS]
    headings = [" ".join(found.split()).strip("#` ") for found in _HEADING.findall(text)]
    questions = [
        f"What does {title} say about {heading}?"
        for heading in headings
        if heading and heading != title
    ]
    if questions:
        return questions
    sentences = _SENTENCE.findall(text)[:3]
    return [f'Explain this, from {title}: "{" ".join(one.split())}"' for one in sentences]


def _question(path: Path, number: int, line: str) -> str:
    text: object = line.strip()
    if line.lstrip().startswith("{"):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidInput(
                "--questions", f"line {number} of {path} is not JSON: {error}", "correct it"
            ) from error
        text = value.get("question")
    if not isinstance(text, str) or not 0 < len(text.strip()) <= MAX_QUESTION_CHARS:
        raise InvalidInput(
            "--questions",
            f"line {number} of {path} has no question of 1 to {MAX_QUESTION_CHARS} characters",
            "write a text, or JSON with a field question",
        )
    return text.strip()
