"""Measures what blends keep of the answers of full computation, on the user's model and documents.

Each question is answered in full and as a blend with each recompute share, greedily. The requests
are trials: they store nothing, and the gateway does not refuse them. Before that the chunks of each
question are stored after other chunks, unless the platform computes them ahead by itself.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient, RequestRefused
from ragcache_cli.commands.sample_questions import make_questions
from ragcache_core.errors import InvalidInput
from ragcache_core.quality.report import MIN_QUESTIONS, BudgetQuality, QualityReport
from ragcache_core.quality.similarity import first_token_kl, rouge_l, words

MAX_SAMPLED_DOCUMENTS = 200
DEFAULT_SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)


@dataclass(frozen=True, slots=True)
class Measurement:
    """How to measure.

    Args:
        shares: Recompute shares of the blends.
        wanted_quality: ROUGE-L F1 that blends should reach; None: the platform's target, or the
            default.
        max_tokens: Length of the compared answers.
    """

    collection: str
    shares: Sequence[float]
    wanted_quality: float | None
    top_k: int
    max_tokens: int


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

    def result(self, share: float) -> BudgetQuality:
        count = len(self.rouge_l)
        return BudgetQuality(
            recompute_share=share,
            rouge_l=math.fsum(self.rouge_l) / max(1, count),
            same_answers=sum(self.same) / max(1, count),
            first_token_kl=math.fsum(self.kl) / len(self.kl) if self.kl else None,
            recomputed_share=min(1.0, self.recomputed_tokens / max(1, self.blended_tokens)),
            blended_share=min(1.0, self.blended_tokens / max(1, self.prompt_tokens)),
            num_questions=count,
        )


async def sample_questions(
    gateway: GatewayApiClient, collection: str, count: int, seed: int
) -> list[str]:
    """Make questions from documents of a collection.

    Raises:
        InvalidInput: The collection has too few documents to ask about.
    """
    documents = []
    for listed in await gateway.list_documents(collection, MAX_SAMPLED_DOCUMENTS):
        document = await gateway.get_document(collection, listed["id"])
        documents.append((str(document["title"]), str(document["text"])))
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
    tell: Callable[[int, int], None],
) -> QualityReport:
    """Answer the questions in every way, and return what blends kept.

    Args:
        tell: Called with the numbers of requests that have ended and of all.
    """
    state = await gateway.quality()
    computed_ahead = bool(state["precompute"]) and state["reuse"] == "blend"
    total = len(questions) * (1 + len(options.shares) + (not computed_ahead))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        tell(done, total)

    if not computed_ahead:
        # All of them first: values are stored some time after their computation.
        for question in questions:
            try:
                await gateway.capture(_body(question, options, {}))
            except RequestRefused as error:
                if error.status != 400:
                    raise  # otherwise nothing was found for this question
            count()
    sums = {share: _Sums() for share in options.shares}
    for question in questions:
        full = await gateway.complete(_body(question, options, {"reuse": "off", "trial": True}))
        count()
        for share, one in sums.items():
            extension = {"reuse": "blend", "max_recompute_share": share, "trial": True}
            one.add(full, await gateway.complete(_body(question, options, extension)))
            count()
    wanted = options.wanted_quality
    if wanted is None:
        wanted = state["wanted_quality"] if state["wanted_quality"] is not None else 0.9
    return QualityReport(
        model=state["model"],
        space=state["space"],
        template=state["template"],
        created_at=_now(),
        capture="ahead" if computed_ahead else "on demand",
        wanted_quality=wanted,
        budgets=tuple(one.result(share) for share, one in sorted(sums.items())),
    )


def report_table(report: QualityReport, max_share: float) -> Table:
    """Return what each recompute share kept, as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("recomputed at most", "ROUGE-L", "same answers", "first-token KL", "recomputed"):
        table.add_column(name, justify="right")
    table.add_column("of tokens blended", justify="right")
    table.add_column("questions", justify="right")
    for one in report.budgets:
        good = one.rouge_l >= report.wanted_quality and one.num_questions >= MIN_QUESTIONS
        kl = "-" if one.first_token_kl is None else f"{one.first_token_kl:.3f}"
        allowed = one.recompute_share <= max_share
        table.add_row(
            f"{one.recompute_share:.0%}",
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


def _body(question: str, options: Measurement, extension: dict[str, Any]) -> dict[str, Any]:
    return {
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
