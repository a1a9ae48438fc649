"""``ragcache ask`` and ``ragcache explain``: an answer, its sources, and what it reused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient
from ragcache_cli.commands.options import (
    CollectionOption,
    GatewayOptions,
    OutputOption,
    grouped,
)
from ragcache_cli.output.console import make_console, print_json, printable
from ragcache_core.errors import InvalidInput

_BAR_CELLS = 32
_STEPS = ("retrieve", "tokenize", "queue", "load", "prefill")


@dataclass(slots=True)
class Reply:
    """An answer that grows with the events of a stream."""

    id: str = ""
    text: str = ""
    finish_reason: str | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)
    timing_ms: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add one event and return the text it carries."""
        extension = chunk.get("ragcache") or {}
        self.id = self.id or str(chunk.get("id") or "")
        self.citations = extension.get("citations") or self.citations
        self.timing_ms = extension.get("timing_ms") or self.timing_ms
        self.cache = extension.get("cache") or self.cache
        added = ""
        for choice in chunk.get("choices", ()):
            added += choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += added
        return added

    def to_json(self) -> dict[str, Any]:
        """Return the whole answer as JSON, for programs."""
        return {
            "id": self.id,
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "citations": self.citations,
            "timing_ms": self.timing_ms,
            "cache": self.cache,
        }


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which model writes an answer, and how."""

    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0, max=2, help="0 takes the most likely token each time."
        ),
    ] = 0.0
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Limit of the answer.", show_default="512"),
    ] = None
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model.", show_default="that of spec.model"),
    ] = None


@dataclass(frozen=True, slots=True)
class Prompting:
    """What a question's prompt is made of, and how it is computed."""

    collection: CollectionOption = "default"
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Chunks to retrieve.", show_default="4")
    ] = None
    reuse: Annotated[
        Literal["exact", "blend", "off"] | None,
        typer.Option(
            "--reuse",
            help="exact; blend, which also loads KV computed after other chunks; or off.",
            show_default="the platform's",
        ),
    ] = None
    max_recompute_share: Annotated[
        float | None,
        typer.Option(
            "--max-recompute-share",
            help="Share, from 0 to 1, that blend recomputes.",
            show_default="the platform's",
        ),
    ] = None

    def to_json(self) -> dict[str, Any]:
        """Return the ``ragcache`` object of a request."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class TimingStep:
    """One step of the time to the first token, with a note about its work."""

    name: str
    ms: float
    note: str = ""


_GREEDY = Sampling()


@grouped
def ask_command(
    question: Annotated[str, typer.Argument(help="The question.")],
    prompting: Prompting,
    sampling: Sampling,
    gateway: GatewayOptions,
    output: OutputOption = "text",
) -> None:
    """Ask a question; show the answer, its sources and the time of each step."""
    if not question.strip():
        raise InvalidInput("QUESTION", "is empty", "write one")
    console = None if output == "json" else make_console()
    reply = gateway.call(
        lambda client: ask(client, question, prompting.to_json(), console, sampling)
    )
    if console is None:
        print_json(reply.to_json())
        return
    for table in (render_citations(reply), render_timing(reply)):
        if table is not None:
            console.print()
            console.print(table)
    if reply.id:
        console.print(Text(f"\nragcache explain {printable(reply.id)}", style="dim"))


@grouped
def explain_command(
    request_id: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help="Id of an answer; `ragcache ask` prints it."),
    ],
    gateway: GatewayOptions,
    output: OutputOption = "text",
) -> None:
    """Show for each chunk of an answer's prompt where its KV came from, and why."""
    explanation = gateway.call(lambda client: client.explanation(request_id))
    if output == "json":
        print_json(explanation)
        return
    make_console().print(render_explanation(explanation))


async def ask(
    gateway: GatewayApiClient,
    question: str,
    options: Mapping[str, Any],
    console: Console | None,
    sampling: Sampling = _GREEDY,
) -> Reply:
    """Ask a question and write the answer to the console as it arrives.

    Args:
        options: The ``ragcache`` object of the request.
    """
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": sampling.temperature,
        "ragcache": dict(options),
    }
    if sampling.model is not None:
        body["model"] = sampling.model
    if sampling.max_tokens is not None:
        body["max_tokens"] = sampling.max_tokens
    reply = Reply()
    async for chunk in gateway.chat(body):
        added = reply.add(chunk)
        if console is not None and added:
            console.out(printable(added), end="", highlight=False)
    if console is not None:
        console.out("")
    return reply


def steps(timing_ms: Mapping[str, Any], cache: Mapping[str, Any]) -> list[TimingStep]:
    """Split the time to the first token into steps; the unexplained rest is ``other``.

    A step without a measurement is left out.
    """
    notes = _notes(timing_ms, cache)
    found = [
        TimingStep(name, float(timing_ms[name]), notes.get(name, ""))
        for name in _STEPS
        if timing_ms.get(name) is not None
    ]
    first_token = timing_ms.get("first_token")
    if first_token is not None:
        rest = float(first_token) - sum(step.ms for step in found)
        found.append(TimingStep("other", max(0.0, rest), "network, sampling"))
    return found


def _notes(timing_ms: Mapping[str, Any], cache: Mapping[str, Any]) -> dict[str, str]:
    notes = {}
    if timing_ms.get("embed") is not None and timing_ms.get("search") is not None:
        notes["retrieve"] = f"embed {timing_ms['embed']:.1f}, search {timing_ms['search']:.1f}"
    if cache.get("loaded_tokens") is not None:
        loaded = f"{cache['loaded_tokens']:,} tokens"
        if cache.get("loaded_bytes"):
            loaded += f", {cache['loaded_bytes'] / 1e6:.1f} MB from the store"
        if cache.get("blended_tokens"):
            loaded += f"; {cache['blended_tokens']:,} blended"
            loaded += f", {cache.get('recomputed_tokens') or 0:,} of them recomputed"
            loaded += f" in {timing_ms.get('recompute') or 0.0:.1f} ms"
        notes["load"] = loaded
        reused = cache["loaded_tokens"] + (cache.get("local_tokens") or 0)
        computed = (cache.get("prompt_tokens") or 0) - reused
        notes["prefill"] = f"{max(0, computed):,} of {cache.get('prompt_tokens') or 0:,} tokens"
    return notes


def render_citations(reply: Reply) -> Table | None:
    """Render the cited documents, or return None if there are none."""
    if not reply.citations:
        return None
    table = Table.grid(padding=(0, 2))
    for number, citation in enumerate(reply.citations, start=1):
        chunk = str(citation.get("chunk", citation.get("document_id", "")))
        preview = " ".join(str(citation.get("text_preview", "")).split())
        table.add_row(
            Text(f"[{number}]", style="dim"),
            Text(f"{float(citation.get('score', 0.0)):.2f}"),
            Text(printable(chunk), style="cyan"),
            Text(printable(str(citation.get("title", "")) + _pages(citation))),
            Text(printable(preview), style="dim", overflow="ellipsis", no_wrap=True),
        )
    return table


def _pages(part: Mapping[str, Any]) -> str:
    """Return the pages of a citation or of a part of a prompt; empty if it has none."""
    if not part.get("page"):
        return ""
    first, last = part["page"], part.get("page_end")
    return f", pages {first}-{last}" if last else f", page {first}"


def render_timing(reply: Reply) -> Table | None:
    """Render one bar per step, proportional to its share of the time to the first token."""
    found = steps(reply.timing_ms, reply.cache)
    whole = sum(step.ms for step in found)
    if not found or whole <= 0:
        return None
    table = Table.grid(padding=(0, 2))
    for step in found:
        cells = round(_BAR_CELLS * step.ms / whole)
        bar = Text("█" * cells, style="green" if step.name == "load" else "blue")
        table.add_row(step.name, _ms(step.ms), bar, Text(step.note, style="dim"))
    if reply.timing_ms.get("first_token") is not None:
        note = Text(str(reply.cache.get("miss") or ""), style="dim")
        table.add_row("first token", _ms(float(reply.timing_ms["first_token"])), "", note)
    if reply.timing_ms.get("total") is not None:
        table.add_row("whole answer", _ms(float(reply.timing_ms["total"])), "", "")
    return table


def _ms(value: float) -> Text:
    return Text(f"{value:,.1f} ms", justify="right")


_COLUMNS: Final = (
    ("PART", "left"),
    ("TOKENS", "right"),
    ("OUTCOME", "left"),
    ("CACHED", "right"),
    ("LOADED", "right"),
    ("COMPUTED", "right"),
    ("TIER", "left"),
    ("REASON", "left"),
    ("PLANNED", "left"),
    ("FROM", "left"),
)
"""REASON: why not all was reused. PLANNED: what the gateway had predicted, and why."""


def render_explanation(explanation: Mapping[str, Any]) -> Group:
    """Render the explanation of an answer: a summary, a table of the parts, and the times."""
    table = Table(box=None, pad_edge=False)
    for name, justify in _COLUMNS:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for index, part in enumerate(explanation["parts"]):
        table.add_row(*(Text(printable(cell)) for cell in _row(part, is_first=index == 0)))
    return Group(Text(printable(_summary(explanation))), table, Text(_times(explanation)))


def _row(part: Mapping[str, Any], *, is_first: bool) -> tuple[str, ...]:
    name = part["chunk"] or ("template" if is_first or part["start"] == 0 else "question")
    name += _pages(part)
    computed = part["computed_tokens"] + part["recomputed_tokens"]
    return (
        name,
        f"{part['tokens']:,}",
        part["outcome"],
        _count(part["cached_tokens"]),
        _count(part["loaded_tokens"]),
        _count(computed),
        part["tier"] or "",
        part["reason"],
        f"{part['planned']}: {part['planned_reason']}" if part["planned"] else "",
        part["planned_source"] or "",
    )


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else ""


def _summary(explanation: Mapping[str, Any]) -> str:
    lines = [
        f"{explanation['id']}: {explanation['prompt_tokens']:,} tokens, "
        f"reuse {explanation['reuse']}, engine {explanation['engine']}"
    ]
    if explanation["miss"]:
        lines.append(f"no more was reused: {explanation['miss']}")
    return "\n".join(lines)


def _times(explanation: Mapping[str, Any]) -> str:
    time = explanation["time"]
    if time is None:
        return "the engine has no record of this answer"
    lines = [f"queue {time['queue_ms']:,.1f} ms, then {_stages(time['measured_ms'])}"]
    if time["predicted_ms"] is not None:
        lines.append(f"predicted {_stages(time['predicted_ms'])}")
    return "\n".join([*lines, *_plan_lines(explanation["plan"])])


def _plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return what the gateway predicted when it chose the engine, and the next best plan."""
    lines = []
    if plan["predicted_ms"] is not None:
        where = plan["engine"]
        if plan.get("prefill_engine", "") not in ("", where):
            where += f", after a prefill on {plan['prefill_engine']}"
        lines.append(f"planned {plan['predicted_ms']['total']:,.1f} ms on {where}")
    position = plan["position"]
    lines.append(
        f"queued in band {position['band']}, {position['cached_share']:.0%} cached: "
        f"{position['delay_ms']:,} of {position['window_ms']:,} ms after its arrival"
    )
    if delay_ms := position["tenant_delay_ms"]:
        lines.append(f"{delay_ms:,} ms later because of other requests of its tenant")
    if (other := plan["next_best"]) is not None:
        predicted_ms = other["predicted_ms"]["total"]
        lines.append(f"next best: {predicted_ms:,.1f} ms, {other['kind']} on {other['engine']}")
    return lines


def _stages(times: Mapping[str, float]) -> str:
    stages = ", ".join(f"{name} {times[name]:,.1f}" for name in ("load", "select", "passes"))
    return f"{times['total']:,.1f} ms ({stages})"
