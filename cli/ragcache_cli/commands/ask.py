"""Asks one question, streams the answer, and shows the time of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayApiClient
from ragcache_cli.output.console import printable

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
    """How the model writes an answer. Temperature 0 takes the most likely token each time.

    ``max_tokens`` None means the gateway's limit.
    """

    temperature: float = 0.0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TimingStep:
    """One step of the time to the first token, with a note about its work."""

    name: str
    ms: float
    note: str = ""


_GREEDY = Sampling()


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
            Text(printable(str(citation.get("title", "")))),
            Text(printable(preview), style="dim", overflow="ellipsis", no_wrap=True),
        )
    return table


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
