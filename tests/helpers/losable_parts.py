"""A whole platform as processes that can be killed, frozen and started again at their addresses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.processes import (
    Service,
    free_port,
    is_serving,
    launch_cachestore,
    launch_engine,
)

MAX_MODEL_LEN = 1024
NUM_ENGINES = NUM_GATEWAYS = 2


@dataclass
class LosablePart:
    """One process of the platform.

    Args:
        launch: Starts the process, always at the same address.
        serves: Whether it serves requests.
    """

    name: str
    launch: Callable[[], Service]
    serves: Callable[[], bool]
    service: Service | None = None

    def start(self) -> None:
        """Start the process, without waiting for it."""
        self.service = self.launch()

    def wait_until_ready(self) -> None:
        """Wait until the process serves."""
        assert self.service is not None
        self.service.wait_until("ready", self.serves)

    def kill(self) -> None:
        """Kill the process and its children at once."""
        assert self.service is not None
        self.service.kill()


@dataclass(frozen=True)
class LosablePlatform:
    """The running parts by name, and the base URL of each gateway."""

    parts: dict[str, LosablePart]
    gateways: tuple[str, ...]


@contextmanager
def losable_platform(folder: Path, model: Path) -> Iterator[LosablePlatform]:
    """A retriever, a cache store, two engines and two gateways, all of them real."""
    retriever = f"127.0.0.1:{free_port()}"
    store_port = free_port()
    engine_ports = [(free_port(), free_port()) for _ in range(NUM_ENGINES)]
    gateway_ports = [free_port() for _ in range(NUM_GATEWAYS)]
    store = f"127.0.0.1:{store_port}"

    def launch_retriever() -> Service:
        env = {
            "RAGCACHE_LISTEN": retriever,
            "RAGCACHE_DATA_DIR": str(folder / "retriever"),
            "RAGCACHE_MODEL": str(model),
            "RAGCACHE_CHUNK_TOKENS": "96",
        }
        return _python("ragcache_retriever", env, folder)

    def launch_gateway(port: int) -> Service:
        engines = ",".join(
            f"http://127.0.0.1:{http};records={records}" for http, records in engine_ports
        )
        env = {
            "RAGCACHE_LISTEN": f"127.0.0.1:{port}",
            "RAGCACHE_RETRIEVER": retriever,
            "RAGCACHE_ENGINES": engines,
            "RAGCACHE_CACHESTORE": store,
            "RAGCACHE_MODEL": str(model),
            "RAGCACHE_MODEL_NAME": "model",
            "RAGCACHE_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
            "RAGCACHE_FIRST_TOKEN_TIMEOUT_S": "20",
            "RAGCACHE_NEXT_TOKEN_TIMEOUT_S": "10",
        }
        return _python("ragcache_gateway", env, folder)

    found = [
        LosablePart("retriever", launch_retriever, lambda: is_serving(retriever)),
        LosablePart(
            "cachestore",
            lambda: launch_cachestore(folder / "store", port=store_port).service,
            lambda: is_serving(store),
        ),
    ]
    for index, (http, records) in enumerate(engine_ports):
        found.append(
            LosablePart(
                f"engine-{index}",
                lambda http=http, records=records: (
                    launch_engine(  # type: ignore[misc]
                        folder / "engines",
                        model,
                        store,
                        max_length=MAX_MODEL_LEN,
                        port=http,
                        records_port=records,
                    ).service
                ),
                _http_probe(http, "/health"),
            )
        )
    for index, port in enumerate(gateway_ports):
        found.append(
            LosablePart(
                f"gateway-{index}",
                lambda port=port: launch_gateway(port),  # type: ignore[misc]
                _http_probe(port, "/v1/status"),
            )
        )
    parts = {part.name: part for part in found}
    try:
        for part in found:
            part.start()
        for part in found:
            part.wait_until_ready()
        yield LosablePlatform(parts, tuple(f"http://127.0.0.1:{port}" for port in gateway_ports))
    finally:
        for part in reversed(found):
            if part.service is not None:
                part.service.thaw()
                part.service.stop()


def _http_probe(port: int, path: str) -> Callable[[], bool]:
    def probe() -> bool:
        try:
            reply = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2, trust_env=False)
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK

    return probe


def _python(package: str, env: dict[str, str], folder: Path) -> Service:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{package}-{os.urandom(3).hex()}.log"
    return Service(package, [sys.executable, "-m", package], env, log)
