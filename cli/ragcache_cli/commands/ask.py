"""One question, its streamed answer, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragcache_cli.clients.gateway_client import GatewayClient
from ragcache_cli.commands.console import printable

_BAR_CELLS = 32
_STEPS = ("retrieve", "tokenize", "queue", "load", "prefill")


@dataclass(slots=True)
class Reply:
    """An answer as it comes in: pieces of a stream added one by one."""

    text: str = ""
    finish_reason: str | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)
    timing_ms: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Take in a chunk of the stream; returns the text it adds."""
        extension = chunk.get("ragcache") or {}
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
        """Everything, for programs."""
        return {
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "citations": self.citations,
            "timing_ms": self.timing_ms,
            "cache": self.cache,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """A share of the time to the first token. note: what was done in it."""

    name: str
    ms: float
    note: str = ""


async def ask(
    gateway: GatewayClient, question: str, options: Mapping[str, Any], console: Console | None
) -> Reply:
    """Ask, writing the answer to the console as it comes. options: the ``ragcache`` extension."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "ragcache": dict(options),
    }
    reply = Reply()
    async for chunk in gateway.chat(body):
        added = reply.add(chunk)
        if console is not None and added:
            console.out(printable(added), end="", highlight=False)
    if console is not None:
        console.out("")
    return reply


def steps(timing_ms: Mapping[str, Any], cache: Mapping[str, Any]) -> list[Step]:
    """What the time to the first token went into; what no part claims comes last as ``other``.

    A step that nothing was recorded of is left out.
    """
    notes = _notes(timing_ms, cache)
    found = [
        Step(name, float(timing_ms[name]), notes.get(name, ""))
        for name in _STEPS
        if timing_ms.get(name) is not None
    ]
    first_token = timing_ms.get("first_token")
    if first_token is not None:
        rest = float(first_token) - sum(step.ms for step in found)
        found.append(Step("other", max(0.0, rest), "network, sampling"))
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
            loaded += f", {cache.get('repaired_tokens') or 0:,} of them repaired"
            loaded += f" in {timing_ms.get('repair') or 0.0:.1f} ms"
        notes["load"] = loaded
        reused = cache["loaded_tokens"] + (cache.get("local_tokens") or 0)
        computed = (cache.get("prompt_tokens") or 0) - reused
        notes["prefill"] = f"{max(0, computed):,} of {cache.get('prompt_tokens') or 0:,} tokens"
    return notes


def render_citations(reply: Reply) -> Table | None:
    """The documents behind the answer; None without any."""
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
    """A bar per step, as long as its share of the time to the first token."""
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
