"""The service's configuration, read from the environment once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ragcache_core.errors import InvalidInput
from ragcache_retriever.documents.collection import Defaults, checked_chunking, checked_window
from ragcache_wire.tracing import otlp_endpoint

BUNDLED_EMBEDDER = "bundled:all-minilm-l6-v2"
MAX_EMBEDDER_THREADS = 256


@dataclass(frozen=True, slots=True)
class EmbedderConfig:
    """Which embedder. source: BUNDLED_EMBEDDER, or the base URL of an OpenAI-compatible endpoint.

    model, api_key: of an endpoint. threads: of the bundled model.
    """

    source: str
    model: str = ""
    api_key: str = field(default="", repr=False)
    threads: int = 1

    @property
    def is_endpoint(self) -> bool:
        """Whether texts are embedded by somebody else's server."""
        return self.source != BUNDLED_EMBEDDER


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the service is told. model: the serving model, whose tokens bound chunks.

    health_listen: "host:port" for health over HTTP; None: not served. otlp_endpoint: base URL of an
    OpenTelemetry collector; None: no spans are made.
    """

    listen: str
    data_dir: Path
    model: str
    embedder: EmbedderConfig
    defaults: Defaults
    log_level: str = "info"
    health_listen: str | None = None
    otlp_endpoint: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Config:
        """Read RAGCACHE_* variables. Raises InvalidInput naming the variable at fault."""
        return cls(
            listen=_address(environ, "RAGCACHE_LISTEN"),
            data_dir=Path(_required(environ, "RAGCACHE_DATA_DIR", "name a folder to keep data in")),
            model=_required(environ, "RAGCACHE_MODEL", "name the serving model"),
            embedder=_embedder(environ),
            defaults=Defaults(
                chunking=checked_chunking(
                    "RAGCACHE_CHUNK_TOKENS",
                    "RAGCACHE_CHUNK_OVERLAP_TOKENS",
                    _integer(environ, "RAGCACHE_CHUNK_TOKENS", 256),
                    _integer(environ, "RAGCACHE_CHUNK_OVERLAP_TOKENS", 32),
                ),
                window=checked_window("RAGCACHE_WINDOW_CHUNKS", _integer(environ, "RAGCACHE_WINDOW_CHUNKS", 1)),
            ),
            log_level=_log_level(environ),
            health_listen=_address(environ, "RAGCACHE_HEALTH_LISTEN")
            if environ.get("RAGCACHE_HEALTH_LISTEN")
            else None,
            otlp_endpoint=otlp_endpoint(environ),
        )


def _required(environ: Mapping[str, str], name: str, fix: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise InvalidInput(name, "is not set", fix)
    return value


def _address(environ: Mapping[str, str], name: str) -> str:
    value = _required(environ, name, "set host:port")
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(name, f"{value!r} is no address", "set host:port")
    return value


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "").strip() or str(default)
    if not value.isdecimal():
        raise InvalidInput(name, f"{value!r} is no whole number", "set digits only")
    return int(value)


def _embedder(environ: Mapping[str, str]) -> EmbedderConfig:
    source = environ.get("RAGCACHE_EMBEDDER", "").strip() or BUNDLED_EMBEDDER
    model = environ.get("RAGCACHE_EMBEDDER_MODEL", "").strip()
    threads = _integer(environ, "RAGCACHE_EMBEDDER_THREADS", 1)
    if not 1 <= threads <= MAX_EMBEDDER_THREADS:
        raise InvalidInput(
            "RAGCACHE_EMBEDDER_THREADS",
            f"{threads} is out of range",
            f"set 1 to {MAX_EMBEDDER_THREADS}",
        )
    if source == BUNDLED_EMBEDDER:
        return EmbedderConfig(source, threads=threads)
    if not source.startswith(("http://", "https://")):
        raise InvalidInput(
            "RAGCACHE_EMBEDDER",
            f"{source!r} is no embedder",
            f"set {BUNDLED_EMBEDDER} or the base URL of an OpenAI-compatible endpoint",
        )
    if not model:
        raise InvalidInput(
            "RAGCACHE_EMBEDDER_MODEL", "is not set", "name the endpoint's embedding model"
        )
    api_key = environ.get("RAGCACHE_EMBEDDER_API_KEY", "").strip()
    return EmbedderConfig(source.rstrip("/"), model, api_key, threads)


def _log_level(environ: Mapping[str, str]) -> str:
    value = environ.get("RAGCACHE_LOG_LEVEL", "").strip().lower() or "info"
    if value.upper() not in logging.getLevelNamesMapping():
        raise InvalidInput(
            "RAGCACHE_LOG_LEVEL", f"{value!r} is no level", "set debug, info, warning or error"
        )
    return value
