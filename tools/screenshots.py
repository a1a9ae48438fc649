"""Take the pictures of the console that the documentation shows.

::

    python -m tools.screenshots [--out docs/images]

It runs the platform of ``examples/quickstart.yaml`` on this machine and ingests this documentation.
Then it asks in a headless Chromium (Debian's package ``chromium``), first with an empty store. It
asks again after a restart of the engine, which empties the engine's own cache. It takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from examples.demo import FEW_TOKENS, MAX_TOKENS, WARM_UP, until_saved
from harness.availability import Unavailable
from harness.browser import Page, chromium_path, console_page, fill, select_tab, submit
from ragcache_cli.clients.gateway_client import GatewayApiClient, GatewayTarget
from ragcache_cli.commands.ask import Sampling
from ragcache_cli.commands.ask import ask as send
from ragcache_cli.commands.ingest import ingest
from ragcache_cli.commands.model import fetch_model_of
from ragcache_cli.commands.progress import ProgressLines
from ragcache_cli.local.platform import LocalPlatform
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.models.number_type import read_cpu_features, use_fast_number_type
from ragcache_cli.output.console import make_console
from ragcache_cli.sources.documents import select
from ragcache_core.errors import RagCacheError
from ragcache_operator.spec.manifest import load_manifest
from ragcache_operator.spec.ragcache import RagCache

Colors = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

ROOT: Final = Path(__file__).resolve().parent.parent
COLLECTION: Final = "default"
"""The collection that the console's forms name."""
QUESTION: Final = "What is a tombstone?"
SECOND_QUESTION: Final = "How does the cache store delete a document, and what is a tombstone?"
"""Finds some of the chunks of the first question, after other ones."""

ANSWER: Final = ("#ask-answer .waterfall", "#ask-answer .parts")
"""What the pictures show of an answer: where its time went, and what became of each chunk."""

WIDTH: Final = 1100
HEIGHT: Final = 900
MARGIN: Final = 16
NEAR: Final = 16
"""Distance of two colours, from 0 to 441, that the eye hardly tells apart in a picture of text."""
MOST_COLORS: Final = 128
MOST_BYTES: Final = 200_000
ANSWER_LIMIT_S: Final = 300.0
"""A small CPU computes some tokens a second."""


def main() -> int:
    """Entry point; 1 if a picture could not be made."""
    parser = argparse.ArgumentParser(
        description="Take the documentation's pictures of the console."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="their folder")
    given = parser.parse_args()
    console = make_console()
    try:
        chromium_path()
    except Unavailable as error:
        console.print(f"screenshots: {error}")
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    cache = load_manifest(ROOT / "examples" / "quickstart.yaml")
    with tempfile.TemporaryDirectory(prefix="ragcache-screenshots-") as name:
        try:
            fetch_model_of(cache, console)
            return run_until_stopped(run(cache, Path(name), given.out))
        except RagCacheError as error:
            console.print(f"screenshots: {error}")
            return 1


async def run(cache: RagCache, folder: Path, out: Path) -> int:
    """Ask, and write the pictures into a folder; returns the exit status."""
    files = select(sorted((ROOT / "docs").glob("*.md"))).files
    progress = ProgressLines(make_console())
    cache = use_fast_number_type(cache, read_cpu_features())
    async with (
        LocalPlatform(cache, folder / "data", progress=progress.report, gateway_port=0) as platform,
        GatewayApiClient(GatewayTarget(platform.gateway_url)) as gateway,
        console_page(platform.gateway_url, folder / "profile") as page,
    ):
        await page.set_size(WIDTH, HEIGHT)
        await page.set_color_scheme("light")
        await ingest(gateway, COLLECTION, files, lambda _: None)
        await warm_up(gateway)
        await ask(page, QUESTION)
        await take(page, out / "console-miss.png", *ANSWER)
        await until_saved(gateway)
        await platform.restart("engine")
        await warm_up(gateway)
        await compare(page, QUESTION)
        await take(page, out / "console-compare.png", "#panel-compare", "#compare-on .waterfall")
        await ask(page, SECOND_QUESTION, reuse="blend")
        await take(page, out / "console-blend.png", *ANSWER)
        await select_tab(page, "tree")
        await page.until("document.querySelectorAll('[role=treeitem]').length > 0")
        await take(page, out / "console-tree.png", "#panel-tree")
        for error in page.errors:
            print(f"screenshots: the page has an error: {error}", file=sys.stderr)
        return 1 if page.errors else 0


async def warm_up(gateway: GatewayApiClient) -> None:
    """Ask without reuse, so that no picture shows the one-time work of a new engine."""
    options = {"collection": COLLECTION, "reuse": "off"}
    await send(gateway, WARM_UP, options, None, Sampling(0.0, FEW_TOKENS))


async def ask(page: Page, question: str, reuse: str = "") -> None:
    """Ask in the view for it, and wait for the answer."""
    await select_tab(page, "ask")
    await fill(page, "ask-max-tokens", str(MAX_TOKENS))
    await page.evaluate(f"document.getElementById('ask-reuse').value = '{reuse}'")
    await fill(page, "ask-question", question)
    await submit(page, "ask-form")
    await until_state(page, "ask-state", "The answer is complete.")


async def compare(page: Page, question: str) -> None:
    """Ask with reuse on and off, and wait for both answers."""
    await select_tab(page, "compare")
    await fill(page, "compare-max-tokens", str(MAX_TOKENS))
    await fill(page, "compare-question", question)
    await submit(page, "compare-form")
    await until_state(page, "compare-state", "Both answers are complete.")


async def until_state(page: Page, element: str, words: str) -> None:
    """Wait until an element tells that an answer has ended; raises RagCacheError if it failed."""
    state = f"document.getElementById('{element}').textContent"
    said = await page.until(f"{state}.match(/omplete|no comparison/) && {state}", ANSWER_LIMIT_S)
    if said != words:
        raise RagCacheError(f"the console says: {said}")


async def take(page: Page, path: Path, first: str, last: str = "") -> None:
    """Write the page from one element to another as a PNG."""
    await asyncio.to_thread(write, await page.picture(first, last, MARGIN), path)


def distinct(colors: Colors) -> Colors:
    """Return the first MOST_COLORS of some colours, without those that are near an earlier one.

    So the many shades at the edges of letters do not displace the colour of a small bar.

    Args:
        colors: Rows of red, green and blue.
    """
    kept = colors[:1]
    for color in colors[1:]:
        if len(kept) == MOST_COLORS:
            break
        if np.square(kept - color).sum(axis=1).min() > NEAR * NEAR:
            kept = np.vstack((kept, color))
    return kept


def write(png: bytes, path: Path) -> None:
    """Write a picture with its most frequent colours, which are enough for text and bars.

    Raises:
        RagCacheError: It has more than MOST_BYTES.
    """
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=np.int32)
    height, width, _ = pixels.shape
    colors, index, counts = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    frequent = distinct(colors[np.argsort(-counts, kind="stable")])
    distances = np.square(colors[:, None] - frequent[None]).sum(axis=2)
    nearest = distances.argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(nearest[index.ravel()].reshape(height, width)).convert("P")
    image.putpalette(frequent.astype(np.uint8).ravel().tolist())
    image.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {width} x {height}, {size:,} bytes")
    if size > MOST_BYTES:
        raise RagCacheError(f"{path} has more than {MOST_BYTES:,} bytes: show less of the page")


if __name__ == "__main__":
    sys.exit(main())
