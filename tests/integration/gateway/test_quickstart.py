"""The program of the quickstart runs against a gateway as it is printed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.kit.documentation import ROOT, blocks
from tests.kit.gateway import MODEL, world

PAGE = ROOT / "docs" / "quickstart-laptop.md"
ADDRESS, SERVED = "http://127.0.0.1:8080", "smollm2"


async def test_the_program_of_the_quickstart_runs(tiny_model: Path, tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if block.kind == "python")
    assert ADDRESS in block.text
    assert SERVED in block.text
    program = tmp_path / "quickstart.py"
    async with world(tiny_model) as gateway:
        text = block.text.replace(ADDRESS, gateway.base_url).replace(SERVED, MODEL)
        program.write_text(text)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), stdout=pipe, stderr=pipe
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    assert "It runs in eu-north." in output.decode()
    assert "tokens were loaded" in output.decode()
