"""Measures what blends keep of the answers of full computation, on the user's model and documents.

Each question is answered in full and as a blend with each recompute share, greedily. The requests
are trials: they store nothing, and the gateway does not refuse them. Before that the chunks of each
question are stored after other chunks, unless the platform computes them ahead by itself.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient, RequestRefused
from ragcache_cli.commands.options import (
    FAILED,
    CollectionOption,
    GatewayOptions,
    OutputOption,
    grouped,
)
from ragcache_cli.output.console import counting_bar, make_console, print_json
from ragcache_core.errors import InvalidInput
from ragcache_core.quality.report import MIN_QUESTIONS, NATIVE, BudgetQuality, QualityReport
from ragcache_core.quality.similarity import first_token_kl, rouge_l, words

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


MAX_SAMPLED_DOCUMENTS = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """How to measure."""

    collection: CollectionOption = "default"
    recompute_shares: Annotated[
        str, typer.Option("--recompute-shares", help="Shares to measure, with commas.")
    ] = "0,0.05,0.1,0.15,0.2,0.3"
    quality: Annotated[
        float | None,
        typer.Option(
            "--quality",
            min=0,
            max=1,
            help="ROUGE-L with full computation that blends should keep.",
            show_default="the platform's reuse.quality, or 0.9",
        ),
    ] = None
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="Chunks to retrieve.")] = 4
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Length of the compared answers.")
    ] = 48
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model.", show_default="that of spec.model"),
    ] = None

    def __post_init__(self) -> None:
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise InvalidInput(
                "--recompute-shares",
                f"is {self.recompute_shares!r}",
                "write shares from 0 to 1, like 0.1,0.2",
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """Recompute shares of the blends. Empty if one is no number."""
        try:
            return tuple(sorted({float(share) for share in self.recompute_shares.split(",")}))
        except ValueError:
            return ()


@dataclass(frozen=True, slots=True)
class QuestionChoice:
    """The questions to measure with: those of a file, or made from documents."""

    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="One question a line, or JSON lines with `question`.",
            show_default="made from headings of the documents",
        ),
    ] = None
    count: Annotated[int, typer.Option("--count", min=1, help="Most questions.")] = 20
    seed: Annotated[int, typer.Option("--seed", help="Seed of the made questions.")] = 0


@grouped
def quality_command(
    chosen: QuestionChoice,
    measurement: Measurement,
    gateway: GatewayOptions,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the report here.")
    ] = None,
    output: OutputOption = "text",
) -> None:
    """Measure what blended answers keep, and tell the platform."""
    given = None if chosen.questions is None else read_questions(chosen.questions)[: chosen.count]

    async def run(client: GatewayApiClient) -> tuple[QualityReport, dict[str, Any]]:
        questions = given
        if questions is None:
            questions = await sample_questions(
                client, measurement.collection, chosen.count, chosen.seed
            )
        with counting_bar(make_console(stderr=True), "measuring", "requests") as report_progress:
            report = await measure(client, questions, measurement, report_progress)
        return report, await client.put_quality_report(report.to_json())

    report, state = gateway.call(run)
    verdicts = {name: state[name] for name in ("verdict", "lossy_verdict")}
    body = {**report.to_json(), **verdicts}
    if out is not None:
        out.write_text(json.dumps(body, indent=2) + "\n")
    if output == "json":
        print_json(body)
    else:
        console = make_console()
        max_share = float(state["max_recompute_share"])
        console.print(report_table(report, max_share))
        console.print(summary(report, max_share, str(state["verdict"])))
        if state["lossy_verdict"] is not None:
            console.print(lossy_summary(state["lossy_precisions"], str(state["lossy_verdict"])))
    if {*verdicts.values()} - {"passed", None}:
        raise typer.Exit(FAILED)


@dataclass(slots=True)
class _Sums:
    """Sums over the questions that one share blended."""

    rouge_l: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    blended_tokens: int = 0
    recomputed_tokens: int = 0

    def add(self, full: dict[str, Any], blended: dict[str, Any]) -> None:
        cache = blended["ragcache"]["cache"]
        if not cache.get("blended_tokens"):
            return  # everything was exact or had to be computed
        answer, reference = _text(blended), _text(full)
        self.rouge_l.append(rouge_l(words(answer), words(reference)))
        self.same.append(answer == reference)
        first_tokens = [one["ragcache"].get("first_token_logprobs") for one in (full, blended)]
        if all(first_tokens):
            self.kl.append(first_token_kl(*first_tokens))
        self.prompt_tokens += cache["prompt_tokens"]
        self.blended_tokens += cache["blended_tokens"]
        self.recomputed_tokens += cache.get("recomputed_tokens") or 0

    def result(self, share: float, precision: str) -> BudgetQuality:
        count = len(self.rouge_l)
        return BudgetQuality(
            recompute_share=share,
            rouge_l=math.fsum(self.rouge_l) / max(1, count),
            same_answers=sum(self.same) / max(1, count),
            first_token_kl=math.fsum(self.kl) / len(self.kl) if self.kl else None,
            recomputed_share=min(1.0, self.recomputed_tokens / max(1, self.blended_tokens)),
            blended_share=min(1.0, self.blended_tokens / max(1, self.prompt_tokens)),
            num_questions=count,
            precision=precision,
        )


async def sample_questions(
    gateway: GatewayApiClient, collection: str, count: int, seed: int
) -> list[str]:
    """Make questions from documents of a collection.

    Raises:
        InvalidInput: The collection has too few documents to ask about.
    """
    documents = []
    async with aclosing(gateway.documents(collection)) as listed:
        async for one in listed:
            document = await gateway.get_document(collection, one.id)
            documents.append((str(document["title"]), str(document["text"])))
            if len(documents) == MAX_SAMPLED_DOCUMENTS:
                break
    questions = make_questions(documents, count, seed)
    if not questions:
        raise InvalidInput(
            "--collection",
            f"{collection!r} has no text to make questions from",
            "ingest documents first, or pass --questions FILE",
        )
    return questions


async def measure(
    gateway: GatewayApiClient,
    questions: Sequence[str],
    options: Measurement,
    report_progress: Callable[[int, int], None],
) -> QualityReport:
    """Answer the questions in every way, and return what blends kept.

    Args:
        report_progress: Called with the numbers of requests that have ended and of all.
    """
    shares, state = options.shares, await gateway.quality(options.model)
    computed_ahead = bool(state["precompute"]) and state["reuse"] == "blend"
    precisions = (NATIVE, *state["lossy_precisions"])
    total = len(questions) * (1 + len(shares) * len(precisions) + (not computed_ahead))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        report_progress(done, total)

    if not computed_ahead:
        # All of them first: values are stored some time after their computation.
        for question in questions:
            try:
                await gateway.capture(_body(question, options, {}))
            except RequestRefused as error:
                if error.status != 400:
                    raise  # otherwise nothing was found for this question
            count()
    sums = {(share, name): _Sums() for share in shares for name in precisions}
    for question in questions:
        full = await gateway.complete(_body(question, options, {"reuse": "off", "trial": True}))
        count()
        for (share, name), one in sums.items():
            extension = {"reuse": "blend", "max_recompute_share": share, "trial": True}
            if name != NATIVE:
                extension["precision"] = name
            one.add(full, await gateway.complete(_body(question, options, extension)))
            count()
    wanted = options.quality
    if wanted is None:
        wanted = state["wanted_quality"] if state["wanted_quality"] is not None else 0.9
    return QualityReport(
        model=state["model"],
        space=state["space"],
        template=state["template"],
        created_at=_now(),
        capture="ahead" if computed_ahead else "on demand",
        wanted_quality=wanted,
        budgets=tuple(one.result(*which) for which, one in sorted(sums.items())),
    )


def report_table(report: QualityReport, max_share: float) -> Table:
    """Return what each recompute share kept, as a table."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "recomputed at most",
        "stored as",
        "ROUGE-L",
        "same answers",
        "first-token KL",
        "recomputed",
    ):
        table.add_column(name, justify="right")
    table.add_column("of tokens blended", justify="right")
    table.add_column("questions", justify="right")
    for one in report.budgets:
        good = one.rouge_l >= report.wanted_quality and one.num_questions >= MIN_QUESTIONS
        kl = "-" if one.first_token_kl is None else f"{one.first_token_kl:.3f}"
        allowed = one.recompute_share <= max_share
        table.add_row(
            f"{one.recompute_share:.0%}",
            one.precision,
            Text(f"{one.rouge_l:.3f}", style="green" if good else "red"),
            f"{one.same_answers:.0%}",
            kl,
            f"{one.recomputed_share:.0%}",
            f"{one.blended_share:.0%}",
            str(one.num_questions),
            style=None if allowed else "dim",
        )
    return table


def summary(report: QualityReport, max_share: float, verdict: str) -> str:
    """Return one line that says what the measurement means for the platform."""
    least = report.least_share(report.wanted_quality, max_share)
    wanted = f"ROUGE-L {report.wanted_quality:g} with full computation"
    if verdict == "passed" and least is not None:
        return f"passed: blends that recompute {least:.0%} keep {wanted}"
    if verdict == "unverified":
        most = max((one.num_questions for one in report.budgets), default=0)
        return (
            f"unverified: only {most} questions were blended, and a verdict needs {MIN_QUESTIONS} "
            f"for a share of at most {max_share:.0%}; pass more with --questions or --count"
        )
    return f"failed: no share up to {max_share:.0%} keeps {wanted}; use exact reuse, or allow more"


def lossy_summary(precisions: Sequence[str], verdict: str) -> str:
    """Return one line that says whether the platform uses values that lost precision."""
    names = ", ".join(precisions)
    if verdict == "passed":
        return f"passed: blends use values that are stored as {names}"
    return (
        f"{verdict}: values that are stored as {names} are computed again; set finer codecs in "
        "cacheStore.precision, or allow more recomputation"
    )


def _body(question: str, options: Measurement, extension: dict[str, Any]) -> dict[str, Any]:
    return {
        **({} if options.model is None else {"model": options.model}),
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "ragcache": {"collection": options.collection, "top_k": options.top_k, **extension},
    }


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def _now() -> str:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return now.isoformat().replace("+00:00", "Z")
