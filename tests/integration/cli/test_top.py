"""``ragcache top`` against a real gateway, and against one that is not there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

from typer.testing import CliRunner, Result

from ragcache_cli.main import app
from tests.kit.gateway import World


async def top(*words: str) -> Result:
    arguments = ["top", "--once", "--interval", "0.1", *words]
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_one_frame_is_one_json_object(platform: World) -> None:
    for form in (("-o", "json"), ("--output", "json")):
        result = await top(*form)
        assert (result.exit_code, result.stderr) == (0, "")
        [line] = result.stdout.splitlines()
        frame = json.loads(line)
        [engine] = frame["engines"]
        assert (engine["ready"], engine["in_flight"]) == (True, 0)
        assert frame["cache"]["tiers"].keys() == {"memory", "disk"}
        assert sum(frame["cache"]["sources_by_state"].values()) >= 1
        assert frame["ingest"]["chunks"] is not None
        # The view's own requests are among those of the gateway.
        assert frame["requests"]["per_s"] > 0


async def test_one_frame_fits_a_narrow_terminal(platform: World) -> None:
    result = await top()
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert platform.base_url in result.stdout
    assert "hit rate" in result.stdout


async def test_a_metrics_page_that_is_not_there_is_named(platform: World) -> None:
    result = await top("--metrics", "http://127.0.0.1:9/metrics")
    assert result.exit_code == 1
    assert "nothing answers at http://127.0.0.1:9/metrics" in result.stderr


def test_a_gateway_that_does_not_answer_is_asked_again() -> None:
    words = ["top", "--interval", "0.1", "--gateway", "http://127.0.0.1:9"]
    command = [sys.executable, "-m", "ragcache_cli", *words]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as view:
        assert view.stderr is not None
        for _ in range(3):
            line = view.stderr.readline()
            assert "nothing answers at http://127.0.0.1:9" in line
            assert line.endswith("; asked again in 0.1 s\n")
        view.send_signal(signal.SIGINT)
        assert view.wait(60) == 0
