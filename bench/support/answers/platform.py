"""The whole product as a user has it: started by ``ragcache up``, and asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.support.answers.question_sets import KnownDocument
from harness.processes import free_port

_TIMEOUT_S = 300.0
_LOG_CHARS = 3_000


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """An answer's text, the tokens of its prompt, and how many of them were reused."""

    text: str
    prompt_tokens: int
    reused_tokens: int


class Platform:
    """A running platform. Its questions have one answer at temperature 0."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._client = httpx.Client(base_url=f"{url}/v1", timeout=_TIMEOUT_S, headers=headers)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def put_collection(
        self, name: str, settings: dict[str, Any], documents: Sequence[KnownDocument]
    ) -> None:
        """Make a collection with these documents only."""
        self.delete_collection(name)
        self._client.put(f"/collections/{name}", json=settings).raise_for_status()
        lines = [
            {
                "id": one.id,
                "text": one.text,
                "content_type": "markdown" if one.text.startswith("#") else "text",
                **({"title": one.title} if one.title else {}),
            }
            for one in documents
        ]
        reply = self._client.post(
            "/documents:batch",
            params={"collection": name},
            content="\n".join(map(json.dumps, lines)).encode(),
            headers={"Content-Type": "application/jsonl"},
        )
        reply.raise_for_status()
        events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        failed = [event for event in map(json.loads, events) if event.get("state") == "failed"]
        if failed:
            raise RuntimeError(f"documents of {name} are refused: {failed[0]}")

    def delete_collection(self, name: str) -> None:
        """Delete a collection, if there is one."""
        reply = self._client.delete(f"/collections/{name}")
        if reply.status_code != httpx.codes.NOT_FOUND:
            reply.raise_for_status()

    def ask(
        self, question: str, options: dict[str, Any], *, system: str | None, max_tokens: int
    ) -> ModelAnswer:
        """Ask a question.

        Args:
            options: The field ``ragcache`` of the request.
            system: System prompt; None: the platform's.
        """
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ragcache": options,
        }
        reply = self._client.post("/chat/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        cache = answer["ragcache"]["cache"]
        loaded = (cache["loaded_tokens"] or 0) - (cache["recomputed_tokens"] or 0)
        return ModelAnswer(
            answer["choices"][0]["message"]["content"] or "",
            answer["usage"]["prompt_tokens"],
            (cache["local_tokens"] or 0) + loaded,
        )


@contextlib.contextmanager
def running_platform(folder: Path, model: str) -> Iterator[Platform]:
    """A platform with its data in a folder.

    Args:
        model: A bundled model, or the path of a folder.
    """
    port = free_port()
    source = f"path:{Path(model).absolute()}" if Path(model).is_dir() else f"bundled:{model}"
    manifest = {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCache",
        "metadata": {"name": "answers"},
        "spec": {
            "model": {"source": source},
            "gateway": {"port": port},
            "engines": [{"name": "main", "kvMemory": "1Gi"}],
            "cacheStore": {"memory": "512Mi", "disk": {"size": "4Gi"}},
        },
    }
    # A SIGTERM would otherwise leave the platform running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    file, data = folder / "ragcache.yaml", folder / "data"
    file.write_text(yaml.safe_dump(manifest))
    try:
        _ragcache("up", "-f", str(file), "--data", str(data), "--detach")
        platform = Platform(f"http://127.0.0.1:{port}")
        try:
            yield platform
        finally:
            platform.close()
    finally:
        _ragcache("down", "--data", str(data))


def _ragcache(*arguments: str) -> None:
    command = [sys.executable, "-m", "ragcache_cli", *arguments]
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-_LOG_CHARS:]
        raise RuntimeError(f"ragcache {arguments[0]} ended with {done.returncode}:\n{said}")
