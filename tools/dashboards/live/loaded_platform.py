"""A platform under load for the check: ``ragcache up`` with the test model, and its operator."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from harness.processes import free_port
from harness.tiny_model import TINYRAG
from models.tinyrag.handbook import Handbook, make_handbook, sample_questions
from ragcache_cli.local.state_file import read_record
from ragcache_operator.builders.pod_monitor import PORTS
from tools.dashboards.files import ROOT
from tools.dashboards.live.prometheus_server import Target

DOCUMENTS: Final = 16
_NAME: Final = "check"
_SEED: Final = 23
_COMMAND_LIMIT_S: Final = 420
_ANSWER_LIMIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class LoadedPlatform:
    """A running platform. ``targets`` are the ports with metrics, one for each part."""

    url: str
    handbook: Handbook
    targets: tuple[Target, ...]


@contextlib.contextmanager
def running_platform(folder: Path, otlp_endpoint: str) -> Iterator[LoadedPlatform]:
    """Run all parts until the block ends, with every feature that has metrics.

    Args:
        otlp_endpoint: Where the parts send spans and metrics. Exemplars need spans.
    """
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    port = free_port()
    model = shutil.copytree(ROOT / "models" / "tinyrag" / "model", folder / "model")
    manifest["metadata"]["name"] = _NAME
    manifest["spec"] |= TINYRAG | {
        "model": {"source": f"path:{model}", "name": "tinyrag"},
        "gateway": {"port": port, "speculation": "auto"},
        "reuse": {"mode": "blend", "maxRecomputeShare": 0.3, "precompute": True},
        "telemetry": {"otlp": {"endpoint": otlp_endpoint}},
    }
    manifest["spec"]["engines"][0]["hostTier"] = "64Mi"
    path = folder / "ragcache.yaml"
    path.write_text(yaml.safe_dump(manifest))
    data = str(folder / "data")
    try:
        _ragcache("up", "-f", str(path), "--data", data, "--detach")
        record = read_record(Path(data))
        assert record is not None
        targets = [
            Target(address, _labels(part.component, part.name))
            for part in record.parts
            for name, address in part.addresses.items()
            if name in PORTS
        ]
        handbook = make_handbook(_SEED, DOCUMENTS, "held_out")
        yield LoadedPlatform(f"http://127.0.0.1:{port}", handbook, tuple(targets))
    finally:
        _ragcache("down", "--data", data)


def operator_target(port: int) -> Target:
    """Return the target of an operator on this port of loopback."""
    labels = {"namespace": "ragcache-system", "component": "operator", "pod": "operator-0"}
    return Target(f"127.0.0.1:{port}", labels)


def _labels(component: str, pod: str) -> dict[str, str]:
    return {"namespace": "default", "ragcache": _NAME, "component": component, "pod": pod}


class Load:
    """Documents and questions of every kind, until it is stopped."""

    def __init__(self, platform: LoadedPlatform) -> None:
        self._platform = platform
        self._client = httpx.Client(
            base_url=f"{platform.url}/v1", timeout=_ANSWER_LIMIT_S, trust_env=False
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.num_answers = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send requests until the block ends."""
        self._write_documents()
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(2 * _ANSWER_LIMIT_S)
            self._client.close()

    def _write_documents(self) -> None:
        for document in self._platform.handbook.documents:
            self._write(document.id, document.text)

    def _run(self) -> None:
        questions = sample_questions(self._platform.handbook, 20, "held_out")
        kinds = itertools.cycle(("exact", "exact", "blend", "stream", "off", "wrong", "document"))
        for question, kind in zip(itertools.cycle(questions), kinds, strict=False):
            if self._stopping.is_set():
                return
            try:
                self._send(question.text, kind)
            except httpx.HTTPError as error:
                # An engine that is late here fails the check by its missing metrics.
                print(f"load: {kind} failed: {error}", file=sys.stderr)

    def _send(self, text: str, kind: str) -> None:
        match kind:
            case "wrong":
                self._ask(text, top_k=0)
            case "document":
                document = self._platform.handbook.documents[self.num_answers % DOCUMENTS]
                self._write(document.id, document.text)
                self._write("passing", f"{text} {time.time()}")
                self._client.delete("/documents/passing")
            case "stream":
                self._ask(text, stream=True)
            case reuse:
                self._ask(text, reuse=reuse)

    def _ask(self, text: str, *, stream: bool = False, **extension: Any) -> None:
        body = {
            "messages": [{"role": "user", "content": text}],
            "stream": stream,
            "ragcache": {"top_k": 6, **extension},
        }
        reply = self._client.post("/chat/completions", json=body)
        self.num_answers += reply.is_success

    def _write(self, document_id: str, text: str) -> None:
        body = {"id": document_id, "text": text}
        self._client.post("/documents", json=body).raise_for_status()


def _ragcache(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ragcache_cli", *arguments],
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=_COMMAND_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ragcache {arguments[0]}:\n{done.stdout}{done.stderr}")
