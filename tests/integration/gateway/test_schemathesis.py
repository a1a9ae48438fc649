"""Requests that are made from the gateway's own OpenAPI document: answers match the document."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.kit.gateway import key, world, write_admin_key

SEED = 7
CONFIG = Path(__file__).with_name("schemathesis.toml")
TIMEOUT_S = 280
FUZZING = pytest.param("fuzzing", marks=pytest.mark.slow)


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("phases", ["examples,coverage", FUZZING])
async def test_no_request_has_an_answer_that_the_document_does_not_allow(
    tiny_model: Path, tmp_path: Path, phases: str
) -> None:
    async with world(tiny_model) as gateway:
        await check(gateway.base_url, tmp_path, "--phases", phases)


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("phases", ["examples", FUZZING])
async def test_a_gateway_with_keys_answers_as_the_document_says(
    tiny_model: Path, tmp_path: Path, phases: str
) -> None:
    file = write_admin_key(tmp_path / "keys.toml")
    async with world(tiny_model, api_keys_file=file) as gateway:
        authorization = f"Authorization: Bearer {key('admin')}"
        # How fields are read does not depend on keys, so their coverage is tested once.
        await check(gateway.base_url, tmp_path, "--phases", phases, "--header", authorization)


async def check(base_url: str, folder: Path, *arguments: str) -> None:
    """Send requests that the document gives, and check the answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
        *("run", f"{base_url}/openapi.json", "--seed", str(SEED), *arguments),
        *("--max-examples", "4", "--no-shrink", "--request-timeout", "30", "--no-color"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-8000:]
