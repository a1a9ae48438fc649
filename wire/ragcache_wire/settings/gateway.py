"""Settings of the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator

from ragcache_wire.settings.field_types import (
    Address,
    Count,
    HostNames,
    HttpUrl,
    LogLevel,
    ModelDtype,
    OnOff,
    Origins,
    Seconds,
    ShardMembers,
    Share,
    SigningKeyFile,
    WholeSeconds,
    whole_number,
)
from ragcache_wire.settings.table import Accepts, ServiceSettings, setting

MIN_MODEL_LEN: Final = 64
"""Below this not even the shortest chat template leaves room for a chunk and an answer."""

_BOUND: Final = "A fixed bound, which tests lower."


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Engines of one kind behind one host name: each address of it has the same two ports."""

    host: str
    http_port: int
    records_port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.http_port};records={self.records_port}"


def _engines(value: str | Sequence[EngineAddress]) -> tuple[EngineAddress, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(_engine(entry.strip()) for entry in value.split(","))


def _engine(entry: str) -> EngineAddress:
    url, _, records = entry.partition(";records=")
    parts = urlsplit(url.strip())
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("no http://host:port")
    records_port = whole_number(records.strip())
    if not parts.port or not 0 < records_port < 65_536:
        raise ValueError("no port")
    return EngineAddress(parts.hostname, parts.port, records_port)


class GatewaySettings(ServiceSettings):
    """What the gateway reads from its environment."""

    service: ClassVar[str] = "gateway"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the REST server binds."""
    retriever: Address = setting(internal="The operator knows the retriever's Service.")
    """Address of the retriever's gRPC server."""
    engines: Annotated[
        tuple[EngineAddress, ...],
        PlainValidator(_engines),
        Accepts("http://host:port;records=port, several with commas between"),
    ] = setting(spec="spec.engines")
    """The engines: where their OpenAI servers are, and the port of each one's request records."""
    cachestore: ShardMembers = setting(internal="The operator mounts the file with the shards.")
    """The shards of the cache store. A file is read again when it changes."""
    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys that the gateway signs reuse plans with, the first one first. The file is read again
    when it changes. Without it, plans carry no signature."""
    model: str = setting(spec="spec.model.source")
    """The model: a folder or a Hugging Face name. The gateway reads its tokenizer and computes the
    fingerprint of its weights."""
    model_name: str = setting(spec="spec.model.name")
    """Name under which the engines serve the model, and which requests give as "model"."""
    model_dtype: ModelDtype = setting("auto", spec="spec.model.dtype")
    """Number format of the KV cache, as the engines have it. auto: as the weights were saved."""
    max_model_len: Annotated[
        int,
        BeforeValidator(whole_number),
        Field(ge=MIN_MODEL_LEN),
        Accepts(f"a number of tokens, {MIN_MODEL_LEN} or more"),
    ] = setting(spec="spec.model.maxLength")
    """Most tokens of prompt and answer together, as vLLM's --max-model-len."""
    reuse: Literal["exact", "blend"] = setting("exact", spec="spec.reuse.mode")
    """How stored KV is used where a request does not say it."""
    max_recompute_share: Share = setting(0.2, spec="spec.reuse.maxRecomputeShare")
    """Most that blend recomputes, as a share of the tokens taken from after other prefixes."""
    quality: Share | None = setting(None, spec="spec.reuse.quality")
    """Mean ROUGE-L F1 with full computations that blended answers must reach. Without it, only
    the share above bounds a blend."""
    precompute: OnOff = setting(False, spec="spec.reuse.precompute")
    """Whether the gateway has KV computed ahead while no request is answered."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP). Without it, no spans are made."""
    log_level: LogLevel = setting("info", internal="The operator runs every service at info.")
    """Least severe level that is logged."""
    stop_grace_s: WholeSeconds = setting(
        10, internal="The operator fits it to the pod's termination grace period."
    )
    """How long answers in flight may go on after SIGTERM. The default suits a terminal."""

    allowed_hosts: HostNames = setting((), spec="spec.gateway.allowedHosts")
    """Host names under which clients reach the gateway. The operator adds those of the Service and
    of the Ingress. IP addresses, localhost and the bound address are always allowed."""
    allowed_origins: Origins = setting((), spec="spec.gateway.allowedOrigins")
    """Origins of web pages that may send requests, beside pages of the gateway's own origin."""
    max_questions: Count = setting(128, spec="spec.gateway.limits.questions")
    """Questions at once. The gateway answers one more with 429."""
    max_document_requests: Count = setting(64, spec="spec.gateway.limits.documentRequests")
    """Requests about documents, collections and searches at once. The gateway answers one more with
    429. Requests about its own state have no limit."""
    first_token_timeout_s: Seconds = setting(
        120.0, spec="spec.gateway.limits.firstTokenTimeoutSeconds"
    )
    """Time from sending a prompt to its first token: queueing, loading and prefill."""
    next_token_timeout_s: Seconds = setting(
        60.0, spec="spec.gateway.limits.nextTokenTimeoutSeconds"
    )
    """Time from one token of an answer to the next."""
    body_max_bytes: Count = setting(8 << 20, internal=_BOUND)
    """Size of one request's body."""
    bodies_max_bytes: Count = setting(64 << 20, internal=_BOUND)
    """Size of all bodies in memory at once, of questions and of document requests each. The gateway
    answers a body over it with 429."""
    body_timeout_s: Seconds = setting(60.0, internal=_BOUND)
    """Time for the whole body of a request to arrive."""
    send_timeout_s: Seconds = setting(60.0, internal=_BOUND)
    """Time for a client to take one event of a stream, before the gateway drops the client."""
    engine_connect_timeout_s: Seconds = setting(2.0, internal=_BOUND)
    """Time to connect to an engine."""
    engine_watch_s: Seconds = setting(2.0, internal="A fixed period, which tests shorten.")
    """Time between two health checks of an engine or the retriever, and between two lookups of the
    host names."""
    default_max_tokens: Count = setting(512, internal="Requests set max_tokens themselves.")
    """Length of an answer for which the client sets none, at most a quarter of the context."""
    token_cache_bytes: Count = setting(64 << 20, internal=_BOUND)
    """Size of the cache of chunks' token ids."""
