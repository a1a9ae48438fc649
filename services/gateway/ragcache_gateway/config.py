"""What the gateway is told by its environment, and the bounds it sets itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from ragcache_core.errors import InvalidInput
from ragcache_wire.tracing import otlp_endpoint
from ragcache_wire.watched.members import Members, members_from
from ragcache_wire.watched.signing_keys import PlanKeys, plan_keys_from

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
ReuseMode = Literal["exact", "blend"]

MIN_MODEL_LEN = 64
"""Below this not even the shortest chat template leaves room for a chunk and an answer."""

STOP_GRACE_S = 10
"""For whoever waits at a terminal; a cluster sets one that suits long answers."""


@dataclass(frozen=True, slots=True)
class EngineName:
    """Engines alike behind one name: every address of host, the same two ports on each."""

    host: str
    http_port: int
    records_port: int


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the gateway is configured by; seconds, bytes and tokens as the names say.

    retriever: "host:port" of its gRPC service. cachestore: the store's shards.
    model: folder or Hugging Face name; read for its tokenizer and its fingerprint.
    model_name: the name under which the engine serves it, and clients ask for it.
    reuse, max_recompute: how stored KV is used where a request does not say it (``reuse.Reuse``).
    quality: ROUGE-L F1 with full recomputation that blends are held to (``quality_trials``); None:
    to nothing but max_recompute.
    precompute: whether chunks are computed ahead of questions (``precompute``).
    otlp_endpoint: base URL of an OpenTelemetry collector; None: no spans are made.
    plan_keys: what plans are sealed with; None leaves them without a seal.
    """

    listen_host: str
    listen_port: int
    retriever: str
    engines: tuple[EngineName, ...]
    cachestore: Members
    model: str
    model_name: str
    model_dtype: Dtype
    max_model_len: int
    reuse: ReuseMode = "exact"
    max_recompute: float = 0.2
    quality: float | None = None
    precompute: bool = False
    otlp_endpoint: str | None = None
    plan_keys: PlanKeys | None = None
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
    """Between two looks at whether an engine is well, and at the addresses of their names."""
    stop_grace_s: int = STOP_GRACE_S
    """How long answers in flight may go on after a stop was asked for."""

    default_max_tokens: int = 512
    """Length of an answer for which the client sets none, at most a quarter of the context."""
    token_cache_bytes: int = 64 << 20
    """For token ids of chunks seen before."""


def read_config(environment: Mapping[str, str]) -> Config:
    """Config from environment variables. Raises InvalidInput naming the variable."""
    host, port = _address(environment, "RAGCACHE_LISTEN")
    dtype = _choice(environment, "RAGCACHE_MODEL_DTYPE", get_args(Dtype))
    reuse = _choice(environment, "RAGCACHE_REUSE", get_args(ReuseMode))
    return Config(
        listen_host=host,
        listen_port=port,
        retriever=_peer(environment, "RAGCACHE_RETRIEVER"),
        engines=_engines(environment),
        cachestore=members_from("RAGCACHE_CACHESTORE", _text(environment, "RAGCACHE_CACHESTORE")),
        model=_text(environment, "RAGCACHE_MODEL"),
        model_name=_text(environment, "RAGCACHE_MODEL_NAME"),
        model_dtype=dtype,  # type: ignore[arg-type]  # checked against the literal above
        reuse=reuse,  # type: ignore[arg-type]  # likewise
        max_recompute=_share(environment, "RAGCACHE_MAX_RECOMPUTE_SHARE", 0.2),
        quality=_quality(environment, "RAGCACHE_QUALITY"),
        precompute=_choice(environment, "RAGCACHE_PRECOMPUTE", ("off", "on")) == "on",
        plan_keys=plan_keys_from(environment),
        max_model_len=_tokens(environment, "RAGCACHE_MAX_MODEL_LEN"),
        otlp_endpoint=otlp_endpoint(environment),
        log_level=_log_level(environment, "RAGCACHE_LOG_LEVEL"),
        stop_grace_s=_seconds(environment, "RAGCACHE_STOP_GRACE_S", STOP_GRACE_S),
    )


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise InvalidInput(name, "is not set", "set it")
    return value


def _choice(environment: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """One of choices; the first, if nothing is set."""
    value = environment.get(name, choices[0])
    if value not in choices:
        raise InvalidInput(name, f"is {value!r}", f"set one of {', '.join(choices)}")
    return value


def _address(environment: Mapping[str, str], name: str) -> tuple[str, int]:
    return _checked_address(name, _text(environment, name))


def _checked_address(name: str, value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidInput(name, f"is {value!r}", "set it to host:port")
    return host.strip("[]"), int(port)


def _peer(environment: Mapping[str, str], name: str) -> str:
    _address(environment, name)
    return _text(environment, name)


def _engines(environment: Mapping[str, str]) -> tuple[EngineName, ...]:
    urls = _text(environment, "RAGCACHE_ENGINES").split(",")
    records = _text(environment, "RAGCACHE_ENGINE_RECORDS").split(",")
    if len(urls) != len(records):
        raise InvalidInput(
            "RAGCACHE_ENGINE_RECORDS",
            f"names {len(records)} for {len(urls)} of RAGCACHE_ENGINES",
            "name one host:port for each of them, in their order",
        )
    return tuple(map(_engine, urls, records))


def _engine(url: str, records: str) -> EngineName:
    host, http_port = _http_address("RAGCACHE_ENGINES", url.strip())
    records_host, records_port = _checked_address("RAGCACHE_ENGINE_RECORDS", records.strip())
    if records_host != host:
        # Of an answer's record there is one copy, in the very engine that gave the answer.
        raise InvalidInput(
            "RAGCACHE_ENGINE_RECORDS",
            f"names {records_host!r} where RAGCACHE_ENGINES names {host!r}",
            "name the same host",
        )
    return EngineName(host, http_port, records_port)


def _http_address(name: str, url: str) -> tuple[str, int]:
    wrong = InvalidInput(name, f"is {url!r}", "set http://host:port, several with commas between")
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
        raise wrong
    return parts.hostname, port


def _seconds(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "").strip() or str(default)
    if not value.isascii() or not value.isdigit():
        raise InvalidInput(name, f"is {value!r}", "set a number of seconds")
    return int(value)


def _share(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name, "").strip() or str(default)
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise InvalidInput(name, f"is {value!r}", "set a share from 0 to 1")
    return share


def _quality(environment: Mapping[str, str], name: str) -> float | None:
    """None, if nothing is set."""
    return _share(environment, name, 0.0) if environment.get(name, "").strip() else None


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
