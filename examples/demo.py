"""The main job in one run: answer questions from real documents, cold and then out of the store.

Starts the platform of ``quickstart.yaml`` on this machine and ingests the documentation of Python's
standard library, or any folder of texts. Then it asks questions three times:

1. cold: the store is empty, and every prompt is computed.
2. exact: after a restart of the engine, which empties the engine's own cache, the same questions
   load the KV of their chunks from the cache store.
3. blend: after another restart, pairs of the questions, so that chunks recur after other chunks and
   at other positions. Each one is asked with reuse and then without. A slow processor saves this
   restart.

On a slow processor it ingests less, and asks fewer questions of fewer passages, so that it ends
within six minutes: it measures a short prompt first (``demo_size``).

It shows speed and citations. A model of this size answers simple questions only, so the exit status
does not depend on what it says: 1 if a question got no answer, or nothing came from the store.

    python examples/demo.py                                  # then asks you, on a terminal
    python examples/demo.py --docs FOLDER --questions FILE   # one question per line
    DEMO=once python examples/demo.py                        # leaves after the table
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.demo_size import (  # noqa: E402
    INGEST_S,
    PAUSE_S,
    SIZES,
    DemoSize,
    Speed,
    asked_about,
    fitting_count,
    largest_size,
    pairs,
)
from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget  # noqa: E402
from ragcache_cli.commands.ask import (  # noqa: E402
    Reply,
    Sampling,
    ask,
    render_citations,
    render_timing,
)
from ragcache_cli.commands.ingest import Ingested, ingest  # noqa: E402
from ragcache_cli.commands.model import fetch_model_of  # noqa: E402
from ragcache_cli.commands.progress import IngestProgress, ProgressLines  # noqa: E402
from ragcache_cli.local.platform import LocalPlatform  # noqa: E402
from ragcache_cli.local.signals import run_until_stopped  # noqa: E402
from ragcache_cli.models.number_type import (  # noqa: E402
    read_cpu_features,
    use_fast_number_type,
)
from ragcache_cli.output.console import make_console  # noqa: E402
from ragcache_cli.sources.documents import DocumentFile, select  # noqa: E402
from ragcache_core.errors import InvalidInput, RagCacheError  # noqa: E402
from ragcache_operator.spec.manifest import load_manifest  # noqa: E402
from ragcache_operator.spec.ragcache import RagCache  # noqa: E402

QUESTIONS = (
    "How do I copy a whole directory tree with shutil?",
    "How do I create a temporary directory with tempfile that is removed afterwards?",
    "How do I run a command with subprocess and capture its output?",
    "How do I read a CSV file whose first row has the field names?",
    "How do I compress data with gzip?",
    "How do I add a positional argument to an argparse parser?",
)
COLLECTION = "demo"
MAX_TOKENS = 40
FEW_TOKENS = 8
"""Of answers that are not shown."""
MOST_QUESTIONS = 12
NOTICE_S = 3.0
"""A wait that is expected to take longer than this is announced."""
SAVE_TIMEOUT_S = 30.0
RENDER_TIMEOUT_S = 120.0
WARM_UP = "What is in these documents?"
MEASURED = "Which functions are described?"
FIRST_DOCUMENTS = 8
"""Of a folder whose documents no question names."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question with an answer from a computed prompt and one from a reused prompt."""

    question: str
    reuse: str
    computed: Reply
    reused: Reply

    @property
    def fault(self) -> str | None:
        """What went wrong, or None."""
        if not (self.computed.text.strip() and self.reused.text.strip()):
            return "no answer"
        if not (self.computed.citations and self.reused.citations):
            return "no citation"
        return None

    @property
    def loaded_tokens(self) -> int:
        """Tokens of the prompt that came from the store."""
        return int(self.reused.cache.get("loaded_tokens") or 0)

    @property
    def ratio(self) -> float:
        """How many times sooner the reused answer began."""
        return first_token_ms(self.computed) / first_token_ms(self.reused)


def main() -> int:
    """Entry point."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description="Answer questions from documents, cold and warm.")
    parser.add_argument("--docs", type=Path, help="folder of .md and .txt files")
    parser.add_argument("--questions", type=Path, help="file with one question per line")
    given = parser.parse_args()
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="ragcache-demo-") as name:
        folder = Path(name)
        try:
            docs = given.docs or render_pages(folder / "pages")
            files = select([docs]).files
            if not files:
                raise InvalidInput("--docs", f"{docs} has no .md or .txt file", "name another one")
            questions = read_questions(given.questions, given.docs, files)
            cache = load_manifest(ROOT / "examples" / "quickstart.yaml")
            fetch_model_of(cache, console)
            return run_until_stopped(run(cache, files, questions, folder / "data", console, begun))
        except RagCacheError as error:
            console.print(Text(f"demo: {error}", style="red"))
            return 1


def render_pages(folder: Path) -> Path:
    """Write the standard library's documentation, in a process that runs nothing else."""
    subprocess.run(
        [sys.executable, "-I", str(ROOT / "examples" / "pydoc_pages.py"), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=RENDER_TIMEOUT_S,
    )
    return folder


def read_questions(
    path: Path | None, docs: Path | None, files: Sequence[DocumentFile]
) -> tuple[str, ...]:
    """Return the questions of the file, the demo's own, or some about the names of documents."""
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = tuple(line.strip() for line in lines if line.strip())[:MOST_QUESTIONS]
        if not questions:
            raise InvalidInput("--questions", f"{path} is empty", "write one question per line")
        return questions
    if docs is None:
        return QUESTIONS
    step = max(1, len(files) // len(QUESTIONS))
    chosen = files[::step][: len(QUESTIONS)]
    return tuple(f"What is {file.path.stem.replace('_', ' ')} about?" for file in chosen)


async def run(
    cache: RagCache,
    files: Sequence[DocumentFile],
    questions: Sequence[str],
    data: Path,
    console: Console,
    begun: float,
) -> int:
    """Run the demo and return the exit status.

    Args:
        begun: When the program started, on the clock of ``time.monotonic``.
    """
    lines = ProgressLines(console)
    cache = use_fast_number_type(cache, read_cpu_features())
    starting = time.monotonic()
    console.print("starting four services: the engine loads the model for 20 to 70 s")
    async with (
        LocalPlatform(cache, data, progress=lines.report, gateway_port=0) as platform,
        GatewayApiClient(GatewayTarget(platform.gateway_url)) as gateway,
    ):
        start_s = time.monotonic() - starting
        done, ingest_s = await ingest_for(gateway, files, questions, console)
        speed = await measure(gateway, start_s, console)
        size = largest_size(speed, time.monotonic() - begun)
        questions = questions[: size.num_questions] if size != SIZES[0] else questions
        console.print(plan_line(size, speed, len(questions)))
        asking = Asking(gateway, console, size, speed)
        console.rule("cold: the store is empty")
        cold = [await asking.ask(questions[0], "exact")]
        first_answer_s = time.monotonic() - begun
        cold += [await asking.ask(text, "exact") for text in questions[1:]]
        await until_saved(gateway)
        console.rule("exact: the engine is restarted, which empties its own cache")
        await asking.restart(platform)
        warm = [await asking.ask(text, "exact") for text in questions]
        same = [
            Asked(text, "exact", *replies)
            for text, *replies in zip(questions, cold, warm, strict=True)
        ]
        await until_saved(gateway)
        console.rule("blend: two questions at once, so that chunks recur in other places")
        if size.num_restarts > 1:
            await asking.restart(platform)
        mixed = [await asking.ask_mixed(text) for text in pairs(questions)]
        console.print()
        console.print(table([*same, *mixed]))
        faults = faults_of(same, mixed)
        for fault in faults:
            console.print(Text(fault, style="red"))
        seconds = {"first_answer_s": first_answer_s, "total_s": time.monotonic() - begun}
        console.print(
            f"first cited answer after {first_answer_s:.0f} s, all after {seconds['total_s']:.0f} s"
        )
        if console.is_terminal and os.environ.get("DEMO") != "once":
            await converse(asking)
    # Programs read the last line.
    figures = summary(done, ingest_s, same, mixed)
    rounded = {name: round(value, 1) for name, value in seconds.items()}
    print(json.dumps({**figures, **rounded, "top_k": size.top_k}), flush=True)
    return 1 if faults else 0


async def ingest_for(
    gateway: GatewayApiClient,
    files: Sequence[DocumentFile],
    questions: Sequence[str],
    console: Console,
) -> tuple[Ingested, float]:
    """Ingest the documents that questions name, and others while there is time.

    Returns:
        What was written, and the seconds that it took.
    """
    named = set(asked_about((file.path.stem for file in files), questions))
    first = [file for file in files if file.path.stem in named] or list(files[:FIRST_DOCUMENTS])
    others = [file for file in files if file not in first]
    begun = time.monotonic()
    with IngestProgress(console, len(files)) as progress:

        async def write(some: Sequence[DocumentFile]) -> Ingested:
            return await ingest(
                gateway, COLLECTION, some, lambda one: progress.advance(one.new_chunks)
            )

        parts = [await write(first)]
        bytes_per_s = sum(map(size_bytes, first)) / (time.monotonic() - begun)
        fitting = fitting_count(list(map(size_bytes, others)), bytes_per_s)
        if fitting:
            parts.append(await write(others[:fitting]))
    ingest_s = time.monotonic() - begun
    done = Ingested(
        written=sum(part.written for part in parts),
        unchanged=sum(part.unchanged for part in parts),
        refused=tuple(error for part in parts for error in part.refused),
        chunks=sum(part.chunks for part in parts),
    )
    console.print(
        f"{done.written} documents, {done.chunks:,} chunks in {ingest_s:.0f} s "
        f"({done.chunks / ingest_s:.0f} chunks/s)"
    )
    if fitting < len(others):
        console.print(
            f"{len(others) - fitting} of {len(files)} documents are left out: on this processor "
            f"they would take longer than {INGEST_S:.0f} s"
        )
    return done, ingest_s


def size_bytes(file: DocumentFile) -> int:
    """Return the size of a file in bytes."""
    return file.path.stat().st_size


async def measure(gateway: GatewayApiClient, start_s: float, console: Console) -> Speed:
    """Return how long this machine computes a short prompt and an answer."""
    console.print("measuring a short prompt: the first one takes up to 10 s")
    asking = Asking(gateway, console, SIZES[-1], Speed(0.0, 0.0, start_s))
    speed = await asking.measure(WARM_UP)
    # The first prompt includes one-time work of the engine. It is a small part of a long time.
    return speed if speed.passage_s >= NOTICE_S else await asking.measure(MEASURED)


def plan_line(size: DemoSize, speed: Speed, num_questions: int) -> str:
    """Return the line that says what follows and how long it takes."""
    computed_s, all_s = speed.first_token_s(size.top_k), size.seconds(speed)
    why = "" if size == SIZES[0] else ", fewer than on a faster processor"
    return (
        f"{num_questions} questions of {size.top_k} passages each{why}: a prompt takes about "
        f"{computed_s:.1f} s to compute, and everything about {all_s:.0f} s"
    )


@dataclass(frozen=True, slots=True)
class Asking:
    """Asks questions of one size, and says what is awaited and for how long."""

    gateway: GatewayApiClient
    console: Console
    size: DemoSize
    speed: Speed

    async def ask(self, text: str, reuse: str) -> Reply:
        """Ask at temperature 0, and show answer, citations and times."""
        self.console.print(f"\n[bold]{text}[/bold]")
        reply = await self._ask(text, reuse, self.size.top_k, self.console)
        for shown in (render_citations(reply), render_timing(reply)):
            if shown is not None:
                self.console.print(shown)
        return reply

    async def ask_silently(self, text: str, top_k: int) -> Reply:
        """Ask without any reuse, and show nothing."""
        return await self._ask(text, "off", top_k, None)

    async def ask_mixed(self, text: str) -> Asked:
        """Ask with blend, and then without any reuse.

        Blended KV stays private to its request, so that the second prompt is computed.
        """
        reused = await self.ask(text, "blend")
        self._announce("the same without reuse", self.speed.first_token_s(self.size.top_k))
        computed = await self.ask_silently(text, self.size.top_k)
        return Asked(text, "blend", computed, reused)

    async def measure(self, text: str) -> Speed:
        """Return how long a prompt of one passage and an answer take."""
        begun = time.monotonic()
        reply = await self.ask_silently(text, 1)
        passage_s = first_token_ms(reply) / 1000
        token_s = max(0.0, time.monotonic() - begun - PAUSE_S - passage_s) / FEW_TOKENS
        return Speed(passage_s, token_s * MAX_TOKENS, self.speed.start_s)

    async def restart(self, platform: LocalPlatform) -> None:
        """Restart the engine, and ask once, so that its one-time work is not measured."""
        self._announce("the engine loads the model", self.speed.start_s)
        await platform.restart("engine")
        await self.ask_silently(WARM_UP, 1)

    async def _ask(self, text: str, reuse: str, top_k: int, console: Console | None) -> Reply:
        await asyncio.sleep(PAUSE_S)
        options = {"collection": COLLECTION, "top_k": top_k, "reuse": reuse}
        sampling = Sampling(0.0, MAX_TOKENS if console is not None else FEW_TOKENS)
        return await ask(self.gateway, text, options, console, sampling)

    def _announce(self, awaited: str, seconds: float) -> None:
        if seconds >= NOTICE_S:
            self.console.print(Text(f"{awaited}: about {seconds:.0f} s", style="dim"))


async def until_saved(gateway: GatewayApiClient) -> None:
    """KV is saved after the answers: wait until no more of it arrives."""
    deadline = time.monotonic() + SAVE_TIMEOUT_S
    before = -1
    while time.monotonic() < deadline:
        variants = (await gateway.cache())["variants"]
        if variants == before and variants > 0:
            break
        before = variants
        await asyncio.sleep(1.0)


def first_token_ms(reply: Reply) -> float:
    """From the request until the first token, as the gateway saw it."""
    return float(reply.timing_ms["first_token"])


def table(asked: Sequence[Asked]) -> Table:
    """Render the times to the first token."""
    made = Table(title="Milliseconds to the first token, computed and with KV from the cache store")
    for column in ("", "reuse", "computed", "reused", "sooner", "prompt", "loaded", "recomputed"):
        made.add_column(column, justify="right")
    for reuse in ("exact", "blend"):
        group = [one for one in asked if one.reuse == reuse]
        for number, one in enumerate(group, start=1):
            tokens = one.reused.cache
            made.add_row(
                str(number),
                reuse,
                f"{first_token_ms(one.computed):,.0f}",
                f"{first_token_ms(one.reused):,.0f}",
                f"{one.ratio:.1f} x",
                f"{tokens.get('prompt_tokens') or 0:,}",
                f"{one.loaded_tokens:,}",
                f"{tokens.get('recomputed_tokens') or 0:,}",
            )
        if group:
            computed, reused = medians(group)
            times = (f"{computed:,.0f}", f"{reused:,.0f}", f"{computed / reused:.1f} x")
            made.add_section()
            made.add_row("median", reuse, *times, "", "", "", style="bold", end_section=True)
    return made


def medians(asked: Sequence[Asked]) -> tuple[float, float]:
    """Return the median times to the first token, computed and reused, in milliseconds."""
    return (
        statistics.median(first_token_ms(one.computed) for one in asked),
        statistics.median(first_token_ms(one.reused) for one in asked),
    )


def faults_of(same: Sequence[Asked], mixed: Sequence[Asked]) -> list[str]:
    """Return what makes the demo fail."""
    found = [f"{one.fault}: {one.question}" for one in (*same, *mixed) if one.fault]
    if not any(one.loaded_tokens for one in same):
        found.append("nothing came from the store after the restart")
    return found


def summary(
    done: Ingested,
    ingest_s: float,
    same: Sequence[Asked],
    mixed: Sequence[Asked],
) -> dict[str, float | int | None]:
    """Return the figures for programs."""
    cold, warm = medians(same)
    computed, blended = medians(mixed) if mixed else (None, None)
    return {
        "documents": done.written,
        "chunks": done.chunks,
        "ingest_s": round(ingest_s, 1),
        "ingest_chunks_per_s": round(done.chunks / ingest_s, 1),
        "questions": len(same),
        "same_answers": sum(one.computed.text == one.reused.text for one in same),
        "prompt_tokens": round(
            statistics.median(int(one.reused.cache.get("prompt_tokens") or 0) for one in same)
        ),
        "cold_ms": round(cold, 1),
        "warm_ms": round(warm, 1),
        "warm_ratio": round(cold / warm, 2),
        "warm_loaded_tokens": sum(one.loaded_tokens for one in same),
        "mixed_questions": len(mixed),
        "computed_ms": computed and round(computed, 1),
        "blend_ms": blended and round(blended, 1),
        "blend_ratio": round(computed / blended, 2) if computed and blended else None,
        "blended_tokens": sum(int(one.reused.cache.get("blended_tokens") or 0) for one in mixed),
        "recomputed_tokens": sum(
            int(one.reused.cache.get("recomputed_tokens") or 0) for one in mixed
        ),
    }


async def converse(asking: Asking) -> None:
    """Let the person at the terminal ask; an empty line ends it."""
    console = asking.console
    console.print("\nAsk about the documents; an empty line ends the demo.")
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
            await asking.ask(text, "exact")
        except RagCacheError as error:
            console.print(f"[red]{error}[/red]")


if __name__ == "__main__":
    raise SystemExit(main())
