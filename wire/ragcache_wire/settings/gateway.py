"""Settings of the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator

from ragcache_wire.settings.field_types import (
    AbsolutePath,
    Address,
    Count,
    HostNames,
    HttpUrl,
    KeyHashes,
    Limit,
    LogForm,
    LogLevel,
    ModelDtype,
    OnOff,
    Origins,
    Seconds,
    SecondsOrZero,
    ShardMembers,
    Share,
    SigningKeyFile,
    WholeSeconds,
    whole_number,
)
from ragcache_wire.settings.table import Accepts, ServiceSettings, setting
from ragcache_wire.watched.limits import FileLimits, FixedLimits, GatewayLimits, Limits

MIN_MODEL_LEN: Final = 64
"""Below this not even the shortest chat template leaves room for a chunk and an answer."""

_BOUND: Final = "A fixed bound, which tests lower."


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Engines of one kind behind one host name: each address of it has the same ports.

    Attributes:
        records_port: Port of RagCache's gRPC server in the engine. None: it is an engine without
            RagCache, which gets no plans.
    """

    host: str
    http_port: int
    records_port: int | None = None

    @classmethod
    def of_url(cls, url: str, records_port: int | None = None) -> EngineAddress:
        """Return the address in a URL like ``http://host:port``. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError("no http://host:port")
        if not parts.port or (records_port is not None and not 0 < records_port < 65_536):
            raise ValueError("no port")
        return cls(parts.hostname, parts.port, records_port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        records = "" if self.records_port is None else f";records={self.records_port}"
        return f"http://{host}:{self.http_port}{records}"


def _engines(value: str | Sequence[EngineAddress]) -> tuple[EngineAddress, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(_engine(entry.strip()) for entry in value.split(","))


def _engine(entry: str) -> EngineAddress:
    url, has_records, records = entry.partition(";records=")
    records_port = whole_number(records.strip()) if has_records else None
    return EngineAddress.of_url(url.strip(), records_port)


class GatewaySettings(ServiceSettings):
    """What the gateway reads from its environment."""

    service: ClassVar[str] = "gateway"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the REST server binds."""
    admin_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Second address, which serves every path. Without it, the first address does. With it, the
    first one serves questions, searches, models and health alone."""
    retriever: Address = setting(internal="The operator knows the retriever's Service.")
    """Address of the retriever's gRPC server."""
    engines: Annotated[
        tuple[EngineAddress, ...],
        PlainValidator(_engines),
        Accepts("http://host:port;records=port or http://host:port, several with commas between"),
    ] = setting(spec="spec.engines")
    """The engines: where their OpenAI servers are, and the port of each one's records and feed. An
    engine without that port is one without RagCache: it gets no plans, and what it has cached is
    inferred from the prompts that it got."""
    cachestore: ShardMembers = setting(internal="The operator mounts the file with the shards.")
    """The shards of the cache store. A file is read again when it changes."""
    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys that the gateway signs reuse plans with, and the tokens with which it reads feeds. The
    first one signs. The file is read again when it changes. Without it, nothing is signed."""
    api_keys_file: AbsolutePath | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """TOML file with the hashes of API keys. The file is read again when it changes. Without it,
    requests need no key."""
    builtin_keys: KeyHashes = setting(
        (), internal="The operator has keys for its self-test and for syncs."
    )
    """Hashes of the keys of the platform's own components, beside those of the file."""
    limits_file: AbsolutePath | None = setting(
        None, internal="The operator mounts the file with spec.gateway.limits."
    )
    """JSON file with limits, which replaces the settings of the same names. The file is read again
    when it changes."""
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
    speculation: Literal["off", "auto"] = setting("off", spec="spec.gateway.speculation")
    """Whether an engine computes the prompt that early stages of a search give, before the search
    has ended. auto: where that is expected to save more time than it wastes."""
    order: Literal["rank", "cached"] = setting("rank", spec="spec.gateway.order")
    """Order of documents in a prompt where a request does not say it. rank: best first. cached: a
    prompt begins with documents whose KV is stored in this order."""
    max_displacement: Count | None = setting(None, spec="spec.gateway.maxDisplacement")
    """Most positions that a document may move from its rank. Without it there is no limit."""
    layout: Literal["system-first", "documents-first"] = setting(
        "system-first", spec="spec.gateway.layout"
    )
    """What a prompt begins with where a request does not say it: the system prompt, or the
    documents, which the system prompt then follows."""
    console: Literal["off", "on"] = setting("on", spec="spec.gateway.console")
    """Whether the gateway serves the console at /console. The page has no data of its own: what it
    shows, it requests with the key of its user."""
    engine_cache_tokens: Count = setting(
        65_536, internal="It only bounds the prediction for engines that do not report their cache."
    )
    """Tokens that the prefix cache of such an engine is assumed to have space for."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) for spans and metrics. Without it,
    none are sent."""
    trace_sample_ratio: Share = setting(1.0, spec="spec.telemetry.otlp.sampleRatio")
    """Share of the traces that start in the gateway and are recorded. A request with a trace
    context follows the decision of its caller."""
    trace_content: OnOff = setting(False, spec="spec.telemetry.content")
    """Whether spans have the text of questions, answers and retrieved chunks."""
    metrics_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address of a port that serves /metrics alone. The REST server serves it too."""
    log_level: LogLevel = setting("info", spec="spec.telemetry.logLevel")
    """Least severe level that is logged."""
    log_format: LogForm = setting("text", spec="spec.telemetry.logs")
    """Format of log lines: text, or one JSON object in each line."""
    stop_grace_s: WholeSeconds = setting(
        10, internal="The operator fits it to the pod's termination grace period."
    )
    """How long answers in flight may go on after SIGTERM. The default suits a terminal."""
    drain_s: SecondsOrZero = setting(
        0.0, internal="The operator sets the time in which Services stop sending requests."
    )
    """How long the gateway accepts requests after SIGTERM while it reports not ready."""
    allowed_hosts: HostNames = setting((), spec="spec.gateway.allowedHosts")
    """Host names under which clients reach the gateway. The operator adds those of the Service and
    of the Ingress. IP addresses, localhost and the bound address are always allowed."""
    allowed_origins: Origins = setting((), spec="spec.gateway.allowedOrigins")
    """Origins of web pages that may send requests, beside pages of the gateway's own origin."""
    rewrite: Literal["off", "rules", "model"] = setting("rules", spec="spec.gateway.rewrite")
    """How the search query is made from a conversation, where a request does not say it."""
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
    max_connections: Limit = setting(4096, spec="spec.gateway.limits.connections")
    """Connections at once, of each address. The gateway answers one more with 503."""
    header_timeout_s: Seconds = setting(10.0, internal=_BOUND)
    """Time for the header of a request to arrive, from its first byte or the connection."""
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
    view_max_nodes: Annotated[
        int, BeforeValidator(whole_number), Field(ge=2), Accepts("a number of nodes, 2 or more")
    ] = setting(200_000, internal=_BOUND)
    """Most nodes of the knowledge tree: variants that engines and shards have. A node takes about
    800 bytes. Above it, the least used ones are left out."""
    token_cache_bytes: Count = setting(64 << 20, internal=_BOUND)
    """Size of the cache of chunks' token ids."""

    def limits(self) -> GatewayLimits:
        """Return the limits that these settings have themselves."""
        return GatewayLimits(
            questions=self.max_questions,
            document_requests=self.max_document_requests,
            first_token_timeout_s=self.first_token_timeout_s,
            next_token_timeout_s=self.next_token_timeout_s,
            connections=self.max_connections,
        )

    def live_limits(self) -> Limits:
        """Return the limits as they are now: those of the file if there is one."""
        if self.limits_file is None:
            return FixedLimits(self.limits())
        return FileLimits(self.limits_file, self.limits())
