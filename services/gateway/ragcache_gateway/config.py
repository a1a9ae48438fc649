"""What the gateway is told by its environment, and the bounds it sets itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from ragcache_core.errors import InvalidInput

Dtype = Literal["auto", "bfloat16", "float16", "float32"]

MIN_MODEL_LEN = 64
"""Below this not even the shortest chat template leaves room for a chunk and an answer."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the gateway is configured by; seconds, bytes and tokens as the names say.

    retriever, engine_records, cachestore: "host:port" of gRPC services.
    engine_url: base of the engine's HTTP server, without a trailing slash.
    model: folder or Hugging Face name; read for its tokenizer and its fingerprint.
    model_name: the name under which the engine serves it, and clients ask for it.
    """

    listen_host: str
    listen_port: int
    retriever: str
    engine_url: str
    engine_records: str
    cachestore: str
    model: str
    model_name: str
    model_dtype: Dtype
    max_model_len: int
    log_level: int = logging.INFO

    max_in_flight: int = 128
    """Requests under /v1 at once; one more is answered 429."""
    body_max_bytes: int = 8 << 20
    bodies_max_bytes: int = 128 << 20
    """Of all bodies held at once, which bounds memory; a body over it is answered 429."""
    body_timeout_s: float = 60.0
    """For the whole body of a request to arrive."""
    send_timeout_s: float = 60.0
    """For a client to take one event of a stream; one that takes none for longer is gone."""

    engine_connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 120.0
    """From sending a prompt to its first token: queueing, loading and prefill."""
    next_token_timeout_s: float = 60.0
    engine_watch_s: float = 2.0
    """Between two looks of the readiness watch at the engine."""

    default_max_tokens: int = 512
    """Length of an answer for which the client sets none, at most a quarter of the context."""
    token_cache_bytes: int = 64 << 20
    """For token ids of chunks seen before."""


def read_config(environment: Mapping[str, str]) -> Config:
    """Config from environment variables. Raises InvalidInput naming the variable."""
    host, port = _address(environment, "RAGCACHE_LISTEN")
    dtype = environment.get("RAGCACHE_MODEL_DTYPE", "auto")
    if dtype not in get_args(Dtype):
        raise InvalidInput(
            "RAGCACHE_MODEL_DTYPE", f"is {dtype!r}", f"set one of {', '.join(get_args(Dtype))}"
        )
    return Config(
        listen_host=host,
        listen_port=port,
        retriever=_peer(environment, "RAGCACHE_RETRIEVER"),
        engine_url=_url(environment, "RAGCACHE_ENGINE_URL"),
        engine_records=_peer(environment, "RAGCACHE_ENGINE_RECORDS"),
        cachestore=_peer(environment, "RAGCACHE_CACHESTORE"),
        model=_text(environment, "RAGCACHE_MODEL"),
        model_name=_text(environment, "RAGCACHE_MODEL_NAME"),
        model_dtype=dtype,  # type: ignore[arg-type]  # checked against the literal above
        max_model_len=_tokens(environment, "RAGCACHE_MAX_MODEL_LEN"),
        log_level=_log_level(environment, "RAGCACHE_LOG_LEVEL"),
    )


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise InvalidInput(name, "is not set", "set it")
    return value


def _address(environment: Mapping[str, str], name: str) -> tuple[str, int]:
    value = _text(environment, name)
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidInput(name, f"is {value!r}", "set it to host:port")
    return host.strip("[]"), int(port)


def _peer(environment: Mapping[str, str], name: str) -> str:
    _address(environment, name)
    return _text(environment, name)


def _url(environment: Mapping[str, str], name: str) -> str:
    value = _text(environment, name)
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(name, f"is {value!r}", "set it to http://host:port")
    return value.rstrip("/")


def _tokens(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isascii() or not value.isdigit() or int(value) < MIN_MODEL_LEN:
        raise InvalidInput(name, f"is {value!r}", f"set a number of tokens from {MIN_MODEL_LEN} on")
    return int(value)


def _log_level(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "info")
    level = logging.getLevelNamesMapping().get(value.upper())
    if level is None:
        raise InvalidInput(name, f"is {value!r}", "set debug, info, warning or error")
    return level
