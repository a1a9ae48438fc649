"""The console as a user sees it: opens it in a browser, fills its forms, reads its texts."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from harness.browser import Page, browser_page

SCREENSHOTS = "RAGCACHE_SCREENSHOTS"
"""Variable with a folder for screenshots; without it they go to the test's own folder."""

QUESTION = "Where does billing run?"

FITS = "document.documentElement.scrollWidth <= window.innerWidth"
"""Whether the page needs no sideways scrolling."""


@asynccontextmanager
async def console_page(gateway_url: str, folder: Path) -> AsyncGenerator[Page, None]:
    """Open the console of a gateway in a browser with an empty profile in a folder."""
    async with browser_page(folder) as opened:
        await opened.set_size(1200, 900)
        await opened.open(f"{gateway_url}/console")
        await opened.until(
            "document.activeElement !== null && !!document.querySelector('#ask-form')"
        )
        yield opened


def screenshots_folder(default: Path) -> Path:
    """Return the folder for screenshots, which exists then."""
    folder = Path(os.environ.get(SCREENSHOTS) or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def fill(page: Page, field: str, text: str) -> None:
    """Type a text into a field, over what it has."""
    await page.evaluate(f"document.getElementById('{field}').select()")
    await page.type(text)


async def submit(page: Page, form: str) -> None:
    """Send a form."""
    await page.evaluate(f"document.getElementById('{form}').requestSubmit()")


async def select_tab(page: Page, name: str) -> None:
    """Select a view."""
    await page.evaluate(f"document.getElementById('tab-{name}').click()")


async def texts(page: Page, selector: str) -> list[str]:
    """Return the text of each element that a selector finds."""
    found = await page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )
    return list(found)


async def begin_to_ask(page: Page, question: str = QUESTION) -> None:
    """Ask, and do not wait."""
    await fill(page, "ask-question", question)
    await submit(page, "ask-form")


async def until_answered(page: Page) -> None:
    """Wait until the answer is complete."""
    await page.until("document.getElementById('ask-state').textContent.includes('complete')")


async def compare_and_wait(page: Page, question: str = QUESTION) -> None:
    """Ask with reuse on and off, and wait for both answers."""
    await select_tab(page, "compare")
    await fill(page, "compare-question", question)
    await submit(page, "compare-form")
    await page.until("document.getElementById('compare-state').textContent.startsWith('Both')")
