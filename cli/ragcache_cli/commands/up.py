"""``ragcache up``, in this terminal or detached from it, and ``ragcache down``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragcache_cli.commands.model import fetch_model_of
from ragcache_cli.commands.options import DataOption, ManifestOption
from ragcache_cli.commands.progress import ProgressLines
from ragcache_cli.local.platform import LocalPlatform
from ragcache_cli.local.process import end_families, is_alive
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.local.state_file import (
    ROOT,
    PlatformRecord,
    find_data,
    only_supervisor,
    read_record,
    remove_record,
)
from ragcache_cli.models.number_type import read_cpu_features, use_fast_number_type
from ragcache_cli.output.console import make_console
from ragcache_operator.spec.manifest import load_manifest
from ragcache_operator.spec.ragcache import RagCache

_POLL_S = 0.2
_READY = "ready in "
"""How the last line of a start begins."""
_STOP_S = 60.0
"""Time for a supervisor to stop its components: ten seconds for each of three groups."""


def up_command(
    file: ManifestOption,
    data: DataOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
) -> None:
    """Run a RagCache on this machine, until Ctrl-C or `ragcache down`."""
    cache = load_manifest(file)
    folder = data or ROOT / cache.metadata.name
    console = make_console()
    fetch_model_of(cache, console)
    if detach:
        raise typer.Exit(_run_detached(file, folder, console))
    raise typer.Exit(run_until_stopped(_run_here(cache, folder, console)))


def down_command(data: DataOption = None) -> None:
    """Stop the RagCache on this machine; its data stays."""
    folder, record = find_data(data)
    _stop(folder, record, make_console())


async def _run_here(cache: RagCache, data: Path, console: Console) -> int:
    """Run until cancelled. Raises what LocalPlatform raises."""
    begun = time.monotonic()
    lines = ProgressLines(console)
    cache = use_fast_number_type(cache, read_cpu_features())
    async with AsyncExitStack() as stack:
        with lines.spinner():
            platform = await stack.enter_async_context(
                LocalPlatform(cache, data, progress=lines.report)
            )
        console.print(
            f"{_READY}{time.monotonic() - begun:.0f} s: {_models(cache)} "
            f"at {platform.gateway_url} (stop with Ctrl-C or `ragcache down`)"
        )
        await platform.keep_running()
    return 0


def _models(cache: RagCache) -> str:
    return " and ".join(
        one.served_name if one.dtype == "auto" else f"{one.served_name} in {one.dtype}"
        for one in cache.spec.models
    )


def _run_detached(manifest: Path, data: Path, console: Console) -> int:
    """Start a supervisor in its own session and show its output until it is ready.

    An interrupt stops the supervisor.

    Returns:
        The supervisor's exit status if it ended before it was ready.

    Raises:
        InvalidInput: Another supervisor uses the data folder.
    """
    (data / "logs").mkdir(parents=True, exist_ok=True)
    with only_supervisor(data):
        # This only checks the lock, so that the log of another supervisor is not truncated.
        pass
    log = data / "logs" / "up.log"
    command = [sys.executable, "-m", "ragcache_cli", "up", "-f", str(manifest.absolute())]
    command += ["--data", str(data.absolute())]
    with log.open("wb") as output, log.open("rb") as shown:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        said = ""
        try:
            while True:
                status = supervisor.poll()
                record = read_record(data)
                is_ready = record and record.pid == supervisor.pid and record.phase == "ready"
                new = shown.read().decode(errors="replace")
                console.out(new, end="", highlight=False)
                said += new
                if status is not None:
                    return status
                # The supervisor says where it answers only after its record says that it does.
                if is_ready and f"\n{_READY}" in f"\n{said}" and said.endswith("\n"):
                    console.print(f"detached (pid {supervisor.pid}); stop it with `ragcache down`")
                    return 0
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            supervisor.terminate()
            return supervisor.wait(_STOP_S)


def _stop(data: Path, record: PlatformRecord, console: Console) -> None:
    """Stop a supervisor and its components, or only these if it has ended."""
    if record.supervisor_lives:
        console.print(f"stopping {record.name} (pid {record.pid})")
        os.kill(record.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while is_alive(record.pid, record.started) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if is_alive(record.pid, record.started):
            console.print(f"it does not stop within {_STOP_S:g} s and is killed")
    left = read_record(data)
    if left is not None:
        end_families({left.pid: left.started, **left.leaders}, grace_s=5.0)
        remove_record(data)
    console.print("stopped")
