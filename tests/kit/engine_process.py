"""A fake engine as a process of its own, which a test can stop, continue and kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.kit.gateway import FakeEngine, serving

_CONTROL = "/kit/engine"


@dataclass
class EngineProcess:
    """A running ``FakeEngine``."""

    process: asyncio.subprocess.Process
    port: int

    def stop(self) -> None:
        """Stop it as a debugger does: its connections stay open, and nothing comes."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after a stop."""
        self.process.send_signal(signal.SIGCONT)

    async def set(self, **fields: Any) -> None:
        """Set fields of the engine. ``True`` for an event makes a new one, ``False`` sets it."""
        async with self._client() as client:
            (await client.post(_CONTROL, json=fields)).raise_for_status()

    async def num_requests(self) -> int:
        """Return how many completions it has got."""
        async with self._client() as client:
            return int((await client.get(_CONTROL)).json())

    def _client(self) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=url, trust_env=False, timeout=60)


@asynccontextmanager
async def engine_process() -> AsyncGenerator[EngineProcess, None]:
    """Run a fake engine as a process until the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        yield EngineProcess(process, int(await process.stdout.readline()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _ControlledEngine(FakeEngine):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != _CONTROL:
            return await super().__call__(scope, receive, send)
        if scope["method"] == "POST":
            for name, value in json.loads((await receive())["body"]).items():
                self._control(name, value)
        content = str(len(self.requests)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    def _control(self, name: str, value: Any) -> None:
        if value is True:
            setattr(self, name, asyncio.Event())
        elif value is False:
            getattr(self, name).set()
            setattr(self, name, None)
        else:
            setattr(self, name, value)


async def _serve() -> None:
    async with serving(_ControlledEngine()) as port:
        print(port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
