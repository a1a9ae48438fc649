"""The main job in one run: answer questions from documents, cold and then out of the cache store.

Makes a service handbook that the bundled model has never seen, starts the platform of
``quickstart.yaml`` on this machine, ingests the handbook and asks five questions. Then the engine
is restarted, which empties its own cache, and the same questions are asked again: their KV comes
back from the cache store. Exits 0 if every answer was the same both times, out of the store the
second time, and at most one was wrong or lacked a citation: a small model errs now and then.

    python examples/demo.py            # then asks you, on a terminal
    DEMO=once python examples/demo.py  # leaves after the table
    DEMO_SEED=7 python examples/demo.py
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.tinyrag.handbook import Handbook, Question, make_handbook, sample_questions  # noqa: E402
from ragcache_cli.clients.gateway_client import GatewayApiClient  # noqa: E402
from ragcache_cli.commands.ask import Reply, ask, render_citations, render_timing  # noqa: E402
from ragcache_cli.commands.ingest import ingest  # noqa: E402
from ragcache_cli.commands.progress import ProgressLines  # noqa: E402
from ragcache_cli.local.platform import LocalPlatform  # noqa: E402
from ragcache_cli.local.signals import run_until_stopped  # noqa: E402
from ragcache_cli.sources.documents import select  # noqa: E402
from ragcache_core.errors import RagCacheError  # noqa: E402
from ragcache_operator.spec.manifest import load_manifest  # noqa: E402

DOCUMENTS = 200
COLLECTION = "handbook"
TOP_K = 8
QUESTIONS = 5
SAVE_TIMEOUT_S = 30.0
WARM_UP = "Which services are there?"


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with its answer from an empty cache and its answer from a full store."""

    question: Question
    cold: Reply
    warm: Reply

    @property
    def fault(self) -> str | None:
        """What the cache did wrong, or None."""
        if said(self.warm) != said(self.cold):
            return f"the warm answer differs: {said(self.warm)!r}"
        if not self.warm.cache.get("loaded_bytes"):
            return "nothing was loaded from the store"
        return None

    @property
    def mistake(self) -> str | None:
        """What is wrong with the answer to begin with, or None."""
        if said(self.cold) != self.question.answer:
            return f"expected {self.question.answer!r}"
        cited = {citation["document_id"].removesuffix(".md") for citation in self.cold.citations}
        if not cited.issuperset(self.question.supports):
            return f"not cited: {', '.join(set(self.question.supports) - cited)}"
        return None


def said(reply: Reply) -> str:
    """The answer without the white space around it."""
    return reply.text.strip()


def draw_questions(handbook: Handbook) -> list[Question]:
    """One fact that stands beside its service's name, and others that stand under "it".

    The latter are the hard ones for a cache: the chunk that holds them means nothing without the
    chunk before it. Questions in two steps are left out: a search by meaning does not find the
    second service's page, which the question does not name.
    """
    drawn = sample_questions(handbook, 60, "held_out")
    single = [question for question in drawn if question.kind == "single"]
    named = [question for question in single if not question.needs_earlier_chunk]
    pronoun = [question for question in single if question.needs_earlier_chunk]
    return [named[0], *pronoun[: QUESTIONS - 1]]


async def ask_all(
    gateway: GatewayApiClient, questions: Sequence[str], console: Console
) -> list[Reply]:
    """Ask one after another, showing everything."""
    replies = []
    for text in questions:
        console.print(f"\n[bold]{text}[/bold]")
        reply = await ask(gateway, text, options(), console)
        for shown in (render_citations(reply), render_timing(reply)):
            if shown is not None:
                console.print(shown)
        replies.append(reply)
    return replies


def options(**more: str) -> dict[str, object]:
    """The ``ragcache`` extension of a request."""
    return {"collection": COLLECTION, "top_k": TOP_K, **more}


async def warm_up(gateway: GatewayApiClient) -> None:
    """Ask a question without reuse, so that the one-time work of a new engine is not measured."""
    await ask(gateway, WARM_UP, options(reuse="off"), None)


async def until_saved(gateway: GatewayApiClient) -> None:
    """Chunk-caches are saved behind the answers: wait until no more of them arrive."""
    deadline = time.monotonic() + SAVE_TIMEOUT_S
    before = -1
    while time.monotonic() < deadline:
        variants = (await gateway.cache())["variants"]
        if variants == before and variants > 0:
            break
        before = variants
        await asyncio.sleep(1.0)


def report(asked: Sequence[Asked], console: Console) -> None:
    """The table of times to first token."""
    table = Table(title="Milliseconds to the first token, cold and with KV from the cache store")
    for column in ("", "cold", "warm", "sooner", "engine cold", "warm", "sooner", "loaded"):
        table.add_column(column, justify="right")
    times = [
        (
            first_token_ms(one.cold),
            first_token_ms(one.warm),
            engine_ms(one.cold),
            engine_ms(one.warm),
        )
        for one in asked
    ]
    for number, (one, took) in enumerate(zip(asked, times, strict=True), start=1):
        loaded, of = one.warm.cache["loaded_tokens"], one.warm.cache["prompt_tokens"]
        num_bytes = one.warm.cache["loaded_bytes"]
        from_store = f"{loaded:,} of {of:,} tokens, {num_bytes / 1e6:.1f} MB"
        table.add_row(str(number), *compared(*took), from_store, end_section=number == len(asked))
    # Of times; what is sooner is their ratio.
    table.add_row("median", *compared(*map(statistics.median, zip(*times, strict=True))), "")
    console.print()
    console.print(table)
    for number, one in enumerate(asked, start=1):
        problem = one.fault or one.mistake
        verdict = "[green]right[/green]" if problem is None else f"[red]{problem}[/red]"
        console.print(f"{number}  {one.question.text}  {said(one.cold)}  {verdict}")


def compared(cold: float, warm: float, engine_cold: float, engine_warm: float) -> list[str]:
    """Two times and their ratio, as seen from outside and in the engine."""
    return [
        cell
        for before, after in ((cold, warm), (engine_cold, engine_warm))
        for cell in (f"{before:.0f}", f"{after:.0f}", f"{before / after:.1f} x")
    ]


def first_token_ms(reply: Reply) -> float:
    """From the request until the first token, as the gateway saw it."""
    return float(reply.timing_ms["first_token"])


def engine_ms(reply: Reply) -> float:
    """Queue, load and prefill, as the engine recorded them."""
    return sum(float(reply.timing_ms[step] or 0.0) for step in ("queue", "load", "prefill"))


def write_pages(handbook: Handbook, folder: Path) -> None:
    """One Markdown file a document."""
    folder.mkdir()
    for document in handbook.documents:
        (folder / f"{document.id}.md").write_text(document.text + "\n", encoding="utf-8")


async def run(handbook: Handbook, folder: Path, console: Console) -> int:
    """The demo with its files in folder; returns the exit status."""
    questions = draw_questions(handbook)
    texts = [question.text for question in questions]
    cache = load_manifest(ROOT / "examples" / "quickstart.yaml")
    lines = ProgressLines(console)
    async with (
        LocalPlatform(cache, folder / "data", progress=lines.tell, gateway_port=0) as platform,
        GatewayApiClient(platform.gateway_url) as gateway,
    ):
        started = time.monotonic()
        done = await ingest(
            gateway, COLLECTION, select([folder / "handbook"]).files, lambda _: None
        )
        console.print(f"{done.written} documents in {time.monotonic() - started:.0f} s")
        console.rule("cold: the store is empty")
        await warm_up(gateway)
        cold = await ask_all(gateway, texts, console)
        await until_saved(gateway)
        console.rule("the engine is restarted, which empties its own cache")
        await platform.restart("engine")
        await warm_up(gateway)
        warm = await ask_all(gateway, texts, console)
        asked = [Asked(*one) for one in zip(questions, cold, warm, strict=True)]
        report(asked, console)
        if console.is_terminal and os.environ.get("DEMO") != "once":
            await converse(gateway, console)
    mistakes = sum(one.mistake is not None for one in asked)
    return 1 if mistakes > 1 or any(one.fault for one in asked) else 0


async def converse(gateway: GatewayApiClient, console: Console) -> None:
    """Let the person at the terminal ask; an empty line ends it."""
    console.print("\nAsk about the services above; an empty line ends the demo.")
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    while True:
        console.print("> ", end="")
        text = (await lines.readline()).decode(errors="replace").strip()
        if not text:
            return
        try:
            await ask_all(gateway, [text], console)
        except RagCacheError as error:
            console.print(f"[red]{error}[/red]")


def main() -> int:
    """Entry point."""
    console = Console(highlight=False, soft_wrap=True)
    seed = int(os.environ.get("DEMO_SEED") or random.SystemRandom().randrange(1 << 32))
    console.print(f"A handbook of {DOCUMENTS} services, made from seed {seed}")
    handbook = make_handbook(seed, DOCUMENTS, "held_out")
    with tempfile.TemporaryDirectory(prefix="ragcache-demo-") as name:
        folder = Path(name)
        write_pages(handbook, folder / "handbook")
        return run_until_stopped(run(handbook, folder, console))


if __name__ == "__main__":
    raise SystemExit(main())
