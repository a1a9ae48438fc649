"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from harness import packages
from harness.packages import Package

needs_chromium = pytest.mark.usefixtures("chromium")

START_S = 60
ANSWER_S = 60


class Page:
    """One page of a browser.

    Attributes:
        errors: Errors of the console and of scripts so far.
        urls: URLs of all requests so far.
        bodies: Bodies of those that have one.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.bodies: list[str] = []

    async def attach(self) -> None:
        """Open an empty page, and record its errors and requests."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        # A picture of the whole page has none, so the page must not be laid out for one.
        await self.call("Emulation.setScrollbarsHidden", hidden=True)

    async def read(self) -> None:
        """Take replies and events until the connection ends."""
        async for message in self._socket:
            value = json.loads(message)
            if "id" in value:
                self._replies.pop(value["id"]).set_result(value)
            else:
                self._take_event(value["method"], value["params"])

    def _take_event(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
            if "postData" in params["request"]:
                self.bodies.append(params["request"]["postData"])

    async def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send(
            json.dumps({"id": number, "method": method, "params": params, **session})
        )
        value = await asyncio.wait_for(reply, ANSWER_S)
        assert "error" not in value, value
        return value["result"]

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        value = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in value, value
        return value["result"].get("value")

    async def until(self, expression: str, timeout_s: float = ANSWER_S) -> Any:
        """Wait until an expression is true; return its value."""
        async with asyncio.timeout(timeout_s):
            while True:
                value = await self.evaluate(expression)
                if value:
                    return value
                await asyncio.sleep(0.02)

    async def open(self, url: str) -> None:
        """Open a URL and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def press(self, key: str) -> None:
        """Press a key that types no character."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    async def type(self, text: str) -> None:
        """Type a text into the element with the focus."""
        await self.call("Input.insertText", text=text)

    async def set_size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Set the size of the window, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    async def set_color_scheme(self, scheme: str) -> None:
        """Prefer dark or light colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        await asyncio.to_thread(path.write_bytes, await self.picture())

    async def picture(self, first: str = "body", last: str = "", margin: int = 0) -> bytes:
        """Return a part of the page as a PNG.

        Args:
            first: Selector of the element that it begins with and that is as wide.
            last: Selector of the element that it ends with; empty: the first one.
            margin: Width of what is shown around them, in CSS pixels.
        """
        left, top, right, bottom = await self.evaluate(
            f"((first, last) => [first.left + scrollX, first.top + scrollY, first.right + scrollX, "
            f"last.bottom + scrollY])(...[{json.dumps(first)}, {json.dumps(last or first)}]"
            ".map((one) => document.querySelector(one).getBoundingClientRect()))"
        )
        clip = {"x": left - margin, "y": top - margin, "scale": 1}
        clip |= {"width": right - left + 2 * margin, "height": bottom - top + 2 * margin}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    async def serious_findings(self) -> list[str]:
        """Return what axe-core calls serious or critical."""
        script = (files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
        await self.evaluate(f"{script}; true")
        found = await self.evaluate(
            "axe.run().then((result) => result.violations"
            ".filter((one) => ['serious', 'critical'].includes(one.impact))"
            ".map((one) => one.id + ': ' + one.nodes.map((node) => node.html).join(' ')))"
        )
        return list(found)


def chromium_path() -> str:
    """Return the path of Chromium's command, which is installed first where CI=true.

    Raises:
        Unavailable: There is none.
    """
    if other := shutil.which("chromium-browser"):
        return other
    packages.require((Package("chromium", "chromium"),))
    return packages.command("chromium")


@asynccontextmanager
async def browser_page(folder: Path) -> AsyncGenerator[Page, None]:
    """Run a Chromium with an empty profile in a folder; yields its page."""
    process = await asyncio.create_subprocess_exec(
        chromium_path(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-proxy-server",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = await _devtools_url(folder / "DevToolsActivePort", process)
        async with connect(url, max_size=None, proxy=None) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            try:
                await page.attach()
                yield page
            finally:
                reading.cancel()
                await asyncio.wait((reading,))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _devtools_url(file: Path, process: asyncio.subprocess.Process) -> str:
    """Wait until the browser has written where it listens."""
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, "Chromium has ended"
            lines = await asyncio.to_thread(_lines, file)
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            await asyncio.sleep(0.05)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


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
