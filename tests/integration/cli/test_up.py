"""``ragcache up``, ``status`` and ``down`` as a user runs them, over stand-ins for the services."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from harness.processes import free_port
from ragcache_cli.local.state_file import PlatformRecord, read_record
from tests.integration.cli.stand_ins import living

ROOT = Path(__file__).parents[3]

# Read by every Python that starts with it on its path; only our command needs the stand-ins.
SITE_CUSTOMIZE = """
import sys
if "ragcache_cli" in sys.orig_argv:
    from ragcache_cli.local import platform
    from tests.integration.cli.stand_ins import stand_ins
    platform.build_children = stand_ins(engine=HABIT)
    from ragcache_cli.local import gpus
    gpus._torch_version = lambda: "2.13.0"
"""

MANIFEST = """
apiVersion: ragcache.dev/v1alpha1
kind: RagCache
metadata: {{name: docs}}
spec:
  model: {{source: "path:{model}"}}
  gateway: {{port: {port}}}
"""


class Desk:
    """A working folder with a manifest in it, and the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / ".ragcache" / "docs"
        self.port = free_port()
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        manifest = MANIFEST.format(model=folder / "model", port=self.port)
        (folder / "docs.yaml").write_text(manifest)
        (folder / "site").mkdir()
        self.parts_are()

    def parts_are(self, engine: str = "") -> None:
        """Stand-ins, the engine with a habit."""
        text = SITE_CUSTOMIZE.replace("HABIT", repr(engine))
        (self.folder / "site" / "sitecustomize.py").write_text(text)

    def wants_gpus(self, number: int) -> None:
        """Give the manifest so many groups of engines on GPUs."""
        with (self.folder / "docs.yaml").open("a") as manifest:
            engines = ", ".join(f"{{name: e{i}, device: cuda}}" for i in range(number))
            manifest.write(f"  engines: [{engines}]\n")

    def has_gpus(self, number: int) -> None:
        """Put a stand-in for the driver's program into the folder."""
        program = self.folder / "nvidia-smi"
        lines = "".join(f"echo '{i}, GPU-{i}, NVIDIA L4, 23034'\n" for i in range(number))
        program.write_text(f"#!/bin/sh\n{lines}")
        program.chmod(0o755)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Begin a command."""
        path = os.pathsep.join((str(self.folder / "site"), str(ROOT)))
        return subprocess.Popen(
            [sys.executable, "-m", "ragcache_cli", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit status, output and errors of a command."""
        with self.start(*words) as command:
            output, errors = command.communicate(timeout=240)
            return command.returncode, output, errors

    @contextmanager
    def up(self) -> Iterator[subprocess.Popen[str]]:
        """`ragcache up`, ready; killed if the test leaves it running, its parts ended later."""
        with self.start("up", "-f", "docs.yaml") as command:
            try:
                assert command.stdout is not None
                for line in command.stdout:
                    if line.startswith("ready in"):
                        break
                yield command
            finally:
                command.kill()

    def record(self) -> PlatformRecord:
        """What runs."""
        record = read_record(self.data)
        assert record is not None
        return record


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    if read_record(desk.data) is not None:
        desk.run("down")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_cleanly(desk: Desk, number: signal.Signals) -> None:
    desk.parts_are(engine="has-child")
    with desk.up() as command:
        pids = [part.pid for part in desk.record().parts]
        pids.append(int((desk.data / "engine-main" / "child.pid").read_text()))
        assert living(pids) == pids
        command.send_signal(number)
        output, errors = command.communicate(timeout=240)
        assert (command.returncode, errors) == (0, "")
        assert [line.split()[1:] for line in output.splitlines()][:1] == [["gateway", "stopped"]]
    assert living(pids) == []
    assert read_record(desk.data) is None


def test_an_engine_on_a_gpu_is_refused_on_a_machine_without_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.wants_gpus(1)
    monkeypatch.setenv("PATH", str(desk.folder))
    for words in ((), ("--detach",)):
        status, output, errors = desk.run("up", "-f", "docs.yaml", *words)
        assert status == 2
        assert (
            "spec: asks for a GPU, and this machine has no NVIDIA GPU: nvidia-smi is not "
            "installed; install the NVIDIA driver, or"
        ) in output + errors
    assert read_record(desk.data) is None


def test_each_engine_on_a_gpu_gets_one_of_the_machine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.wants_gpus(2)
    desk.has_gpus(2)
    monkeypatch.setenv("PATH", f"{desk.folder}{os.pathsep}{os.environ['PATH']}")
    with desk.up() as command:
        devices = {
            part.name: psutil.Process(part.pid).environ().get("CUDA_VISIBLE_DEVICES")
            for part in desk.record().parts
        }
        command.send_signal(signal.SIGINT)
        command.wait()
    assert devices == {
        **dict.fromkeys(("gateway", "retriever", "cachestore")),
        **{"engine-e0": "GPU-0", "engine-e1": "GPU-1"},
    }


def test_detached_it_is_found_and_stopped(desk: Desk) -> None:
    status, output, errors = desk.run("up", "-f", "docs.yaml", "--detach")
    assert (status, errors) == (0, "")
    first_output = output
    # On a processor without AVX-512 it names the number type too.
    assert re.search(rf": model( in float32)? at http://127.0.0.1:{desk.port} ", output)
    record = desk.record()
    pids = [record.pid, *(part.pid for part in record.parts)]
    assert living(pids) == pids

    status, output, _ = desk.run("status")
    assert status == 0
    assert output.startswith(f"docs: ready; model at http://127.0.0.1:{desk.port}\n")
    for part in record.parts:
        assert f"{part.name} " in output
        assert str(part.pid) in output
    assert "the gateway answers questions" in output
    assert "cache: no shard of the cache store answers" in output  # the stand-in has none

    status, output, errors = desk.run("status", "--output", "json")
    assert (status, errors) == (0, "")
    found = json.loads(output)
    assert (found["name"], found["pid"], found["phase"]) == ("docs", record.pid, "ready")
    assert (found["answering"], found["problem"]) == (True, None)
    shown = [(part["name"], part["pid"], part["phase"]) for part in found["parts"]]
    assert shown == [(part.name, part.pid, "ready") for part in record.parts]

    for words in ((), ("--detach",)):
        status, _, errors = desk.run("up", "-f", "docs.yaml", *words)
        assert status == 2
        assert errors.startswith("ragcache: --data: a RagCache already runs in")
    assert (desk.data / "logs" / "up.log").read_text() in first_output

    status, output, _ = desk.run("down")
    assert (status, output) == (0, f"stopping docs (pid {record.pid})\nstopped\n")
    assert living(pids) == []
    status, _, errors = desk.run("down")
    assert (status, errors) == (
        2,
        "ragcache: --data: nothing runs in .ragcache; "
        "start one with `ragcache up`, or name another with --data\n",
    )


def test_logs_are_shown_while_it_runs_and_afterwards(desk: Desk) -> None:
    with desk.up() as command:
        status, output, errors = desk.run("logs")
        assert (status, errors) == (0, "")
        sources = {line.partition(" | ")[0] for line in output.splitlines()}
        assert sources == {part.name for part in desk.record().parts}
        status, output, _ = desk.run("logs", "docs", "engine", "--tail", "1")
        assert (status, output.count("\n")) == (0, 1)
        assert output.startswith("engine-main | ")
        status, _, errors = desk.run("logs", "engine-other")
        assert status == 2
        assert errors.startswith("ragcache: part 'engine-other' does not exist; the parts here")
        with desk.start("logs", "--follow", "gateway") as following:
            assert following.stdout is not None
            assert following.stdout.readline().startswith("gateway | ")
            following.send_signal(signal.SIGINT)
            assert following.wait(timeout=60) == 0
        assert desk.run("status", "docs")[0] == 0
        command.send_signal(signal.SIGINT)
        command.wait()
    assert desk.run("logs", "gateway")[1].startswith("gateway | ")


def test_down_ends_what_a_killed_supervisor_left(desk: Desk) -> None:
    with desk.up() as command:
        pids = [part.pid for part in desk.record().parts]
        command.kill()
        command.wait()
        status, output, _ = desk.run("status")
        assert status == 1
        assert "its supervisor is gone; clean up with `ragcache down`" in output
        assert living(pids) == pids
        psutil.Process(pids[0]).kill()
        status, output, _ = desk.run("status", "--output", "json")
        found = json.loads(output)
        assert (status, found["phase"], found["answering"]) == (1, "gone", False)
        phases = [part["phase"] for part in found["parts"]]
        assert phases == ["gone"] + ["ready"] * (len(pids) - 1)
        assert desk.run("down")[0] == 0
        assert living(pids) == []


@pytest.mark.parametrize("words", [(), ("--detach",)])
def test_a_part_that_dies_ends_it_with_its_last_words(desk: Desk, words: tuple[str, ...]) -> None:
    desk.parts_are(engine="dies")
    status, output, errors = desk.run("up", "-f", "docs.yaml", *words)
    assert status == 1
    assert "the engine-main ended with status 3; the end of" in output + errors
    assert "this part has no luck" in output + errors
    assert "Traceback" not in output + errors
    assert read_record(desk.data) is None


def test_a_manifest_with_mistakes_says_all_of_them(desk: Desk) -> None:
    (desk.folder / "docs.yaml").write_text(
        "apiVersion: ragcache.dev/v1alpha1\nkind: RagCache\nmetadata: {name: docs}\n"
        "spec:\n  gateway: {prot: 80}\n  modle: {}\n"
    )
    assert desk.run("up", "-f", "docs.yaml") == (
        2,
        "",
        "ragcache: spec.gateway.prot: unknown field; did you mean port?\n"
        "ragcache: spec.modle: unknown field; did you mean model?\n",
    )
