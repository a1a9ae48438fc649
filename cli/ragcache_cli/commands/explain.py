"""Shows where the KV of each part of an answer's prompt came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ragcache_cli.output.console import printable

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
        lines.append(f"planned {plan['predicted_ms']['total']:,.1f} ms on {plan['engine']}")
    if (other := plan["next_best"]) is not None:
        predicted_ms = other["predicted_ms"]["total"]
        lines.append(f"next best: {predicted_ms:,.1f} ms, {other['kind']} on {other['engine']}")
    return lines


def _stages(times: Mapping[str, float]) -> str:
    stages = ", ".join(f"{name} {times[name]:,.1f}" for name in ("load", "select", "passes"))
    return f"{times['total']:,.1f} ms ({stages})"
