"""Requests that are made from the gateway's own OpenAPI document: answers match the document."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.helpers.gateway_fakes import world

SEED = 7
CONFIG = Path(__file__).with_name("schemathesis.toml")
TIMEOUT_S = 280


@pytest.mark.timeout(TIMEOUT_S + 20)
async def test_no_request_has_an_answer_that_the_document_does_not_allow(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with world(tiny_model) as gateway:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{gateway.base_url}/openapi.json", "--seed", str(SEED)),
            *("--max-examples", "4", "--phases", "examples,coverage,fuzzing"),
            *("--no-shrink", "--request-timeout", "30", "--no-color"),
            cwd=tmp_path,
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
