"""Counts right answers to questions with known answers, by setting, over HTTP.

The whole product runs as ``ragcache up`` starts it, or as ``--url`` names it. A question is asked
once with each setting, one after the other, at temperature 0. An answer is right if it has the
words of a right answer of the data, and none of a wrong one that the set names.

Sets of questions:

- ``manuals``: made here. Two manuals of each machine have one form, and differ in name and values.
- ``xquad``: articles of XQuAD, each one document; ``musique``: paragraphs with titles;
  ``cacheblend``: long contexts without titles. They need the public data of ``--data``.

Settings, each with one difference from the default:

- ``no labels``: passages without the name of their document and section
- ``top_k N``, ``chunks of N``: passages of a prompt, and most tokens of a chunk
- ``documents first``: the system prompt follows the documents
- ``labels in the system prompt``: a system prompt that says what the labels are

Figures:

- ``right_share``: by set and setting, with a Wilson interval
- ``gain``: of the default over another setting, over the same questions, with a bootstrap interval
- ``tokens_added_by_labels``: mean of a question's prompt, over all sets
- ``reused_share_with_labels``, ``reused_share_without``: tokens of prompts that were reused, over
  all tokens, when the questions of the first set are asked one after the other under a new system
  prompt; ``label_reuse_cost`` is the difference
- ``reused_share_with_times``: the same with another time in the system prompt of each question, by
  layout, if ``documents first`` is among the settings
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench.support.answers.intervals import Interval, gain, share
from bench.support.answers.platform import ModelAnswer, Platform, running_platform
from bench.support.answers.question_sets import SOURCES, QuestionSet
from bench.support.program import options, say

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DEFAULT, NO_LABELS, DOCUMENTS_FIRST = "default", "no labels", "documents first"
MAX_ANSWER_TOKENS = 24
QUICK_QUESTIONS, QUESTIONS = 12, 60
NAMES_LABELS = (
    "Answer the question from the documents. Each passage begins with the name of its document in "
    "brackets. If they do not contain the answer, reply: not in the documents."
)

AT_ONCE = 8
"""Questions of one setting that are asked at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How documents are prepared, and how questions are asked.

    Attributes:
        collection: Settings of the collection.
        options: The field ``ragcache`` of requests.
        system: System prompt; None: the platform's.
    """

    collection: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None


def chunks_of(size: int) -> dict[str, Any]:
    """Return the settings of a collection with chunks of a size, in tokens."""
    return {"chunking": {"size_tokens": size, "overlap_tokens": min(32, size // 4)}}


SETTINGS: Mapping[str, Setting] = {
    DEFAULT: Setting(),
    NO_LABELS: Setting({"labels": False}),
    "top_k 2": Setting(options={"top_k": 2}),
    "top_k 8": Setting(options={"top_k": 8}),
    "chunks of 128": Setting(chunks_of(128)),
    "chunks of 512": Setting(chunks_of(512)),
    DOCUMENTS_FIRST: Setting(options={"layout": "documents-first"}),
    "labels in the system prompt": Setting(system=NAMES_LABELS),
}


class AnswersRun:
    """Asks the questions of sets with settings, and keeps the answers."""

    def __init__(self, platform: Platform, settings: Mapping[str, Setting]) -> None:
        self._platform = platform
        self._settings = settings
        self._names: dict[str, str] = {}
        self.answers: dict[tuple[str, str], list[ModelAnswer]] = {}

    def measure(self, known: QuestionSet) -> dict[str, list[bool]]:
        """Return for each setting which questions have a right answer."""
        began = time.monotonic()
        for setting in self._settings.values():
            self._collection(known, setting)
        found: dict[str, list[ModelAnswer]] = {name: [] for name in self._settings}
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for first in range(0, len(known.questions), AT_ONCE):
                asked = known.questions[first : first + AT_ONCE]
                for name, setting in self._settings.items():
                    ask = partial(self._ask, known, setting)
                    answers = threads.map(ask, [one.text for one in asked])
                    found[name] += answers
                say(f"{known.name}: {first + len(asked)} asked, {time.monotonic() - began:.0f} s")
        self.answers |= {(known.name, name): answers for name, answers in found.items()}
        return {
            name: [one.is_right(a.text) for one, a in zip(known.questions, answers, strict=True)]
            for name, answers in found.items()
        }

    def reused_share(
        self, known: QuestionSet, setting: Setting, *, with_times: bool = False
    ) -> float:
        """Return the share of prompts' tokens that is reused under a new system prompt.

        Args:
            with_times: Whether the system prompt has another time for each question.
        """
        system = f"Answer from the documents. Reader {uuid.uuid4().hex}."
        answers = []
        for i, one in enumerate(known.questions):
            time_of_day = f" It is {i // 60:02}:{i % 60:02}." if with_times else ""
            new = replace(setting, system=system + time_of_day)
            answers.append(self._ask(known, new, one.text, max_tokens=1))
        reused = sum(answer.reused_tokens for answer in answers)
        return round(reused / sum(answer.prompt_tokens for answer in answers), 4)

    def close(self) -> None:
        """Delete the collections."""
        for name in self._names.values():
            self._platform.delete_collection(name)

    def _ask(
        self, known: QuestionSet, setting: Setting, question: str, max_tokens: int | None = None
    ) -> ModelAnswer:
        asked = {"collection": self._collection(known, setting), **setting.options}
        return self._platform.ask(
            question, asked, system=setting.system, max_tokens=max_tokens or MAX_ANSWER_TOKENS
        )

    def _collection(self, known: QuestionSet, setting: Setting) -> str:
        """Return the collection of a set with a setting, and make it at first."""
        own = {} if known.chunk_tokens is None else chunks_of(known.chunk_tokens)
        settings = {**own, **setting.collection}
        key = f"{known.name} {json.dumps(settings, sort_keys=True)}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"answers-{known.name}-{len(self._names)}"
            self._platform.put_collection(name, settings, known.documents)
        return name


def read_sets(given: argparse.Namespace) -> Iterator[QuestionSet]:
    """Yield the sets that are asked for, and say which ones lack their data."""
    count = given.questions or (QUICK_QUESTIONS if given.quick else QUESTIONS)
    for name in given.sets or (["manuals"] if given.quick else list(SOURCES)):
        source = SOURCES[name]
        if source.file is not None and not (given.data / source.file).is_file():
            say(f"{name}: skipped, because --data has no {source.file}")
            continue
        yield source.make(given.data, count, Random(given.seed))


def run(platform: Platform, given: argparse.Namespace) -> dict[str, object]:
    """Ask all questions, and return the figures."""
    names = given.settings or ([DEFAULT, NO_LABELS] if given.quick else list(SETTINGS))
    settings = {name: SETTINGS[name] for name in dict.fromkeys((DEFAULT, NO_LABELS, *names))}
    answers = AnswersRun(platform, settings)
    sets = list(read_sets(given))
    rng = Random(given.seed)
    right_share: dict[str, dict[str, Interval]] = {}
    gains: dict[str, dict[str, Interval]] = {}
    try:
        for known in sets:
            right = answers.measure(known)
            right_share[known.name] = {name: share(one) for name, one in right.items()}
            gains[known.name] = {
                name: gain(right[DEFAULT], one, rng)
                for name, one in right.items()
                if name != DEFAULT
            }
            say(json.dumps(right_share[known.name]))
        with_labels, without = (
            answers.reused_share(sets[0], settings[name]) for name in (DEFAULT, NO_LABELS)
        )
        with_times = {
            name: answers.reused_share(sets[0], settings[name], with_times=True)
            for name in (DEFAULT, DOCUMENTS_FIRST)
            if DOCUMENTS_FIRST in settings
        }
    finally:
        answers.close()
    if given.show:
        show(sets, answers)
    return {
        "right_share": right_share,
        "gain": gains,
        "tokens_added_by_labels": round(_added_tokens(sets, answers), 1),
        "reused_share_with_labels": with_labels,
        "reused_share_without": without,
        "reused_share_with_times": with_times,
        "label_reuse_cost": round(without - with_labels, 4),
        "model": given.model,
        "seed": given.seed,
    }


def show(sets: Sequence[QuestionSet], answers: AnswersRun) -> None:
    """Print each question with its answers."""
    for known in sets:
        for i, one in enumerate(known.questions):
            say(f"\n{one.text} {one.right}")
            for (name, setting), found in answers.answers.items():
                if name == known.name:
                    mark = "right" if one.is_right(found[i].text) else "wrong"
                    say(f"  {setting}: {mark} ({found[i].prompt_tokens}): {found[i].text!r}")


def _added_tokens(sets: Sequence[QuestionSet], answers: AnswersRun) -> float:
    pairs = [
        (one.prompt_tokens, other.prompt_tokens)
        for known in sets
        for one, other in zip(
            answers.answers[known.name, DEFAULT],
            answers.answers[known.name, NO_LABELS],
            strict=True,
        )
    ]
    return fmean(one - other for one, other in pairs)


def main() -> None:
    parser = options(__doc__, "a few questions on made manuals, with labels and without")
    parser.add_argument("--questions", type=int, help="questions of each set")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="smollm2", help="a bundled model or a folder")
    parser.add_argument("--url", help="a running gateway, in place of one that is started")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the public data")
    parser.add_argument("--sets", nargs="*", choices=list(SOURCES))
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS))
    parser.add_argument("--show", action="store_true", help="print the answers")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if given.url:
            platform = stack.enter_context(contextlib.closing(Platform(given.url)))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            platform = stack.enter_context(running_platform(folder, given.model))
        figures = run(platform, given)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
