"""Run the real engine on one NVIDIA GPU and print what works and how fast it is.

::

    python tools/device/run.py [--dry] [--only NAME ...] [--logs DIR]

Prints one line of JSON for each stage and one with everything at the end. ``--dry`` runs the same
stages on the CPU, with the vLLM of the project's own environment and a small model. It skips only
the checks of the card itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # when run as a program

from tools.device.packages import FOLDER, MANIFEST, PACKED, ROOT
from tools.device.report import PREFIX

LIMIT_S: Final = 400.0
FALLBACK_S: Final = 110.0
"""Least time left for another start of an engine."""

STOP_S: Final = 15.0
START_FAILED: Final = 3
"""Exit status of an engine program whose engine did not start."""

PACKAGE_FOLDERS: Final = (
    *(".", "core", "wire", "kv"),
    *("services/engine", "services/cachestore"),
)

CARD, TORCH, WORKER = "card", "torch", "worker"
ENGINE_A, ENGINE_B = "engine-a", "engine-b"
GROUPS: Final = (CARD, TORCH, WORKER, ENGINE_A, ENGINE_B)
STARTED: Final = {ENGINE_A: "engine A: start", ENGINE_B: "engine B: start"}
"""The stage that shows that an engine has started."""

WORKER_STAGE: Final = "worker: steps on a simulated GPU"
CARD_STAGES: Final = ("card", "flash attention", "host memory")

FALLBACKS: Final[tuple[tuple[str, tuple[str, ...], dict[str, str]], ...]] = (
    ("vLLM's own choice", (), {}),
    ("attention in Triton", ("--attention", "TRITON_ATTN"), {}),
    ("model runner V1", ("--attention", "TRITON_ATTN"), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    (
        "nothing compiled",
        ("--attention", "TRITON_ATTN", "--no-compile"),
        {"VLLM_USE_V2_MODEL_RUNNER": "0", "TORCH_COMPILE_DISABLE": "1"},
    ),
)
"""What an engine that does not start tries next, in this order."""


@dataclass(slots=True)
class Run:
    """A run's folder, environment and results.

    Attributes:
        dry: Whether it uses the CPU.
        folder: For weights, stores and caches; removed at the end.
        logs: For the programs' own output.
        env: Of all programs.
        deadline: When all of them end, in monotonic seconds.
        stages: The line of each stage, by its name.
        tried: Starts of engines that failed, as text.
        waiting: Set once engine B waits for its turn, or has ended.
    """

    dry: bool
    folder: Path
    logs: Path
    env: dict[str, str]
    deadline: float
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    waiting: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return "cpu" if self.dry else "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add(self, line: dict[str, Any]) -> None:
        """Print a stage's line and keep it."""
        with self._lock:
            self.stages[line["stage"]] = line
            if line["stage"] == STARTED[ENGINE_B] and line["passed"]:
                self.waiting.set()
            print(json.dumps(line), flush=True)

    def program(self, name: str, arguments: Sequence[str], env: dict[str, str]) -> tuple[int, str]:
        """Run a Python program until it ends or the time is over.

        Returns:
            Its exit status, and its last line of output that is no stage's.
        """
        last = ""
        with (self.logs / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            watch = threading.Timer(max(0.0, self.left_s), _stop, [process])
            watch.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(PREFIX):
                        self.add(json.loads(line))
                    else:
                        log.write(line)
                        last = line.strip() or last
            finally:
                watch.cancel()
            return process.wait(), last


def _stop(process: subprocess.Popen[str]) -> None:
    """End a program: it stops its store itself, unless it hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        os.killpg(process.pid, signal.SIGKILL)


def unpack() -> Path:
    """Unpack the folder, unless an earlier run did; return where it is.

    Raises:
        FileNotFoundError: Nothing is packed.
    """
    manifest = (PACKED / MANIFEST).read_text()
    site = FOLDER / "site"
    stamp = site / MANIFEST
    if stamp.exists() and stamp.read_text() == manifest:
        return site
    archives = sorted(PACKED.glob("*.tar.xz"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(len(archives)) as pool:  # lzma works without Python's lock
        list(pool.map(lambda path: _extract(path, site), archives))
    stamp.write_text(manifest)
    return site


def _extract(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(site, filter="data")


def environment(site: Path | None) -> dict[str, str]:
    """Return the environment in which the programs find our packages, and vLLM if it is packed."""
    folders = [str((ROOT / name).resolve()) for name in PACKAGE_FOLDERS]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if site is not None:
        folders.insert(0, str(site))
        torch = importlib.util.find_spec("torch")
        if torch is not None and torch.origin is not None:
            cuda = Path(torch.origin).parents[1] / "nvidia" / "cu13" / "lib"
            libraries = [str(cuda), env.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH", "")])])
    return env


def run_card(run: Run) -> None:
    """Check the card, the libraries and FlashAttention 3."""
    if run.dry:
        for name in CARD_STAGES:
            run.add({"stage": name, "passed": None, "skipped": "no GPU in a dry run"})
        return
    status, last = run.program(CARD, ["-m", "tools.device.stages.card"], {})
    if status:
        _note_crash(run, CARD, status, last)


def run_worker(run: Run) -> None:
    """Count what the connector's worker asks of a GPU. Only a dry run does, on a simulated one."""
    if not run.dry:
        return
    folder = run.folder / WORKER
    given = ["-m", "tools.device.stages.worker_steps", "--folder", str(folder)]
    status, last = run.program(WORKER, given, {})
    if status and WORKER_STAGE not in run.stages:
        _note_crash(run, WORKER, status, last)


def counted(stages: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return launches, copies and host waits of each kind of step, if they were counted."""
    steps = stages.get(WORKER_STAGE, {}).get("steps", {})
    return {
        figure: {name: step[figure] for name, step in steps.items()}
        for figure in ("launches", "cache_writes", "copies", "host_waits")
        if steps
    }


def run_torch(run: Run) -> None:
    """Run the benchmark of the connector's device side in plain torch."""
    started = time.monotonic()
    status, last = run.program(TORCH, ["-m", "bench.device_blend", "--quick"], {})
    found: dict[str, Any] = {"passed": status == 0}
    try:
        found["figures"] = json.loads(last)
    except ValueError:
        found |= {"passed": False, "error": f"exit status {status}: {last[:400]}"}
    run.add({"stage": "plain torch", **found, "seconds": round(time.monotonic() - started, 2)})


def run_engine(run: Run, name: str, module: str, extra: Sequence[str] = ()) -> None:
    """Run the stages of an engine, with the next fallback while it does not start."""
    stage = STARTED[name]
    error, earlier = "", ""
    for number, (what, arguments, env) in enumerate(FALLBACKS):
        folder = run.folder / f"{name}-{number}"
        folder.mkdir()
        given = ["-m", module, "--device", run.device, "--folder", str(folder)]
        status, last = run.program(name, [*given, *arguments, *extra], env)
        line = run.stages.get(stage, {})
        if line.get("passed"):
            if number:
                run.tried.append(f"{name}: started with {what}")
            break
        error, earlier = line.get("error") or f"exit status {status}: {last[:200]}", error
        run.tried.append(f"{name}: {what}: {error}")
        if run.left_s < FALLBACK_S or run.dry or error == earlier:
            break
    if status not in (0, START_FAILED):
        _note_crash(run, name, status, last)


def _note_crash(run: Run, name: str, status: int, last: str) -> None:
    """Add a failed stage for a program that ended before its stages did."""
    error = f"exit status {status}: {last[:400]}"
    run.add({"stage": f"{name}: end", "passed": False, "error": error})


def run_groups(run: Run, wanted: Sequence[str]) -> None:
    """Run the groups. On a GPU machine the engines start together, and measure one by one."""
    turn = run.folder / "turn"
    first = {
        CARD: lambda: run_card(run),
        ENGINE_A: lambda: run_engine(run, ENGINE_A, "tools.device.stages.correctness"),
    }

    def measure() -> None:
        if TORCH in wanted:
            run_torch(run)
        if WORKER in wanted:
            run_worker(run)
        turn.touch()

    def engine_b() -> None:
        try:
            wait = ("--wait-for", str(turn))
            run_engine(run, ENGINE_B, "tools.device.stages.speed", wait)
        finally:
            run.waiting.set()

    if run.dry:
        for name, work in first.items():
            if name in wanted:
                work()
        measure()
        if ENGINE_B in wanted:
            engine_b()
        return
    with ThreadPoolExecutor(3) as pool:
        later = [pool.submit(engine_b)] if ENGINE_B in wanted else []
        for future in [pool.submit(work) for name, work in first.items() if name in wanted]:
            future.result()
        if later:
            run.waiting.wait(run.left_s)
        measure()
        for future in later:
            future.result()


def packed_bytes() -> int | None:
    """Return the size of the packed folder, or None without one."""
    with contextlib.suppress(FileNotFoundError):
        size: int = json.loads((PACKED / MANIFEST).read_text())["packed_bytes"]
        return size
    return None


def main() -> int:
    """Run the command; 1 if a stage failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, with a small model")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="default: all")
    parser.add_argument("--logs", type=Path, help="default: .gpu/logs")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds, default 400")
    given = parser.parse_args()
    started = time.monotonic()
    logs = given.logs or FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ragcache-device-") as folder:
        site = None if given.dry else unpack()
        unpack_s = time.monotonic() - started
        run = Run(given.dry, Path(folder), logs, environment(site), started + given.limit)
        run_groups(run, given.only)
    stages = list(run.stages.values())
    failed = [line["stage"] for line in stages if line["passed"] is False]
    print(
        json.dumps(
            {
                "card": run.stages.get("card", {}).get("card"),
                "stages": run.stages,
                "stages_passed": sum(line["passed"] is True for line in stages),
                "stages_failed": len(failed),
                "failed": failed,
                "stages_skipped": [line["stage"] for line in stages if line["passed"] is None],
                "fallbacks": run.tried,
                **counted(run.stages),
                "packed_bytes": packed_bytes(),
                "unpack_s": round(unpack_s, 1),
                "seconds": round(time.monotonic() - started, 1),
            }
        ),
        flush=True,
    )
    return 1 if failed or not stages else 0


if __name__ == "__main__":
    sys.exit(main())
