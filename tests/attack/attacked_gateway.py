"""A gateway as a process with API keys, beside fakes of the other components."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from harness.processes import free_port
from tests.integration.gateway.test_process import environment_with, until_it_answers
from tests.kit.gateway import World, bearer, world, write_keys

ENTRIES = {
    "red": 'scopes = ["ask", "write"]\ntenant = "red"',
    "blue": 'scopes = ["ask", "write"]\ntenant = "blue"',
}
QUESTION = {"messages": [{"role": "user", "content": "Where?"}]}


@dataclass
class AttackedGateway:
    """A gateway whose key ``red`` attacks, and whose key ``blue`` has to be served meanwhile."""

    port: int
    client: httpx.AsyncClient
    process: psutil.Process
    log: Path
    fakes: World

    async def post(self, name: str, path: str, body: bytes) -> httpx.Response:
        """Send JSON with the key of a name."""
        headers = bearer(name) | {"Content-Type": "application/json"}
        return await self.client.post(path, content=body, headers=headers)

    async def serves_blue(self) -> None:
        """Check that health and the other tenant are answered."""
        assert (await self.client.get("/healthz")).status_code == 200
        answer = await self.client.post(
            "/v1/chat/completions", json=QUESTION, headers=bearer("blue")
        )
        assert answer.status_code == 200, answer.text


@asynccontextmanager
async def attacked_gateway(
    model: Path, folder: Path, entries: Mapping[str, str] = ENTRIES, /, **environment: str
) -> AsyncIterator[AttackedGateway]:
    """Run a gateway, and check at the end that its log has no traceback.

    Args:
        entries: Of the key file, see ``write_keys``.
    """
    port, log = free_port(), folder / "gateway.log"
    keys = write_keys(folder / "keys.toml", entries)
    async with world(model) as fakes:
        env = environment_with(fakes, f"127.0.0.1:{port}", **environment)
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ragcache_gateway"),
                env=env | {"RAGCACHE_API_KEYS_FILE": str(keys)},
                stderr=file,
            )
        try:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60, limits=limits
            ) as client:
                await until_it_answers(client)
                yield AttackedGateway(port, client, psutil.Process(process.pid), log, fakes)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert "Traceback" not in log.read_text()
