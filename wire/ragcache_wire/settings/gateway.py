"""Settings of the gateway."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter, model_validator

from ragcache_core.access.networks import Network, parse_networks
from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import InvalidInput
from ragcache_core.planner.request_plan import EngineRole
from ragcache_core.tiering.precision_policy import PrecisionPolicy
from ragcache_wire.settings.field_types import (
    AbsolutePath,
    Address,
    ByteQuantity,
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
    PrecisionSetting,
    Seconds,
    SecondsOrZero,
    ServerCertificateFolder,
    ShardMembers,
    Share,
    SigningKeyFile,
    StoreKeyFile,
    WholeSeconds,
    whole_number,
)
from ragcache_wire.settings.part import PartSettings
from ragcache_wire.settings.table import Accepts, setting, variable
from ragcache_wire.watched.limits import FileLimits, FixedLimits, GatewayLimits, Limits

MIN_MODEL_LEN: Final = 64
"""Below this not even the shortest chat template leaves room for a chunk and an answer."""

HTTPS_PORT: Final = 443

_BOUND: Final = "A fixed bound, which tests lower."


_ROLES: Final[Mapping[str, EngineRole]] = {role: role for role in get_args(EngineRole)}


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Engines of one kind behind one host name: each address of it has the same ports.

    Attributes:
        records_port: Port of RagCache's gRPC server in the engine. None: it is an engine without
            RagCache, which gets no plans.
        is_tls: Whether it serves HTTPS. An engine with RagCache has a certificate of the platform.
            Of another server, the host name is one engine, and not each address.
        key_file: File with the API key that requests to it carry. None: they carry none.
        served_name: Name of the model there. None: the one that clients request.
        model: Position of the model that it serves in ``GatewaySettings.models``.
        role: What these engines do for a request. Without RagCache they do all.
    """

    host: str
    http_port: int
    records_port: int | None = None
    is_tls: bool = False
    key_file: Path | None = None
    served_name: str | None = None
    model: int = 0
    role: EngineRole = "both"

    @classmethod
    def of_url(
        cls,
        url: str,
        records_port: int | None = None,
        *,
        key_file: Path | None = None,
        served_name: str | None = None,
        model: int = 0,
        role: EngineRole = "both",
    ) -> EngineAddress:
        """Return the address in a URL like ``http://host:port``. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no http://host:port")
        if parts.path not in ("", "/"):
            raise ValueError("a path")
        is_tls = parts.scheme == "https"
        port = parts.port or (HTTPS_PORT if is_tls else 0)
        if not port or (records_port is not None and not 0 < records_port < 65_536):
            raise ValueError("no port")
        return cls(parts.hostname, port, records_port, is_tls, key_file, served_name, model, role)

    @property
    def authority(self) -> str:
        """The host name and the port, as URLs have them."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.http_port}"

    def __str__(self) -> str:
        options = {
            "records": self.records_port,
            "key": self.key_file,
            "served": self.served_name,
            "model": self.model or None,
            "role": None if self.role == "both" else self.role,
        }
        given = (f";{name}={value}" for name, value in options.items() if value is not None)
        return f"http{'s' * self.is_tls}://{self.authority}{''.join(given)}"


def _engines(value: str | Sequence[EngineAddress]) -> tuple[EngineAddress, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(_engine(entry) for entry in value.split(","))


def _engine(entry: str) -> EngineAddress:
    url, *options = (part.strip() for part in entry.split(";"))
    given = dict(option.split("=", 1) for option in options)
    records, key, served = (given.pop(name, None) for name in ("records", "key", "served"))
    model = whole_number(given.pop("model", 0))
    role = _ROLES.get(given.pop("role", "both"))
    if given or "" in (records, key, served):
        raise ValueError("an unknown or empty option")
    if role is None or (role != "both" and records is None):
        raise ValueError("a role that no engine has, or one of an engine without RagCache")
    return EngineAddress.of_url(
        url,
        None if records is None else whole_number(records),
        key_file=None if key is None else Path(key),
        served_name=served,
        model=model,
        role=role,
    )


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model that engines serve.

    Attributes:
        name: Name that requests give as "model".
        source: A folder, or a Hugging Face name.
        dtype: Number format of the KV cache, as ``RAGCACHE_MODEL_DTYPE``.
        max_length: Most tokens of prompt and answer together.
        num_ranks: Tensor parallel ranks of each of its engines.
    """

    name: str
    source: str
    dtype: ModelDtype
    max_length: int
    num_ranks: int = 1


_MODELS: Final = TypeAdapter(tuple[ModelSettings, ...])


def models_text(models: Sequence[ModelSettings]) -> str:
    """Return models as a setting has them."""
    return _MODELS.dump_json(tuple(models)).decode()


def _models(value: str | Sequence[ModelSettings]) -> tuple[ModelSettings, ...]:
    return _MODELS.validate_json(value) if isinstance(value, str) else tuple(value)


_ISSUERS: Final = TypeAdapter(tuple[TokenIssuer, ...])


def issuers_text(issuers: Sequence[TokenIssuer]) -> str:
    """Return issuers of tokens as a setting has them."""
    return _ISSUERS.dump_json(tuple(issuers)).decode()


def _token_issuers(value: str | Sequence[TokenIssuer]) -> tuple[TokenIssuer, ...]:
    issuers = _ISSUERS.validate_json(value) if isinstance(value, str) else tuple(value)
    for names in ([one.name for one in issuers], [one.issuer for one in issuers]):
        if len(set(names)) < len(names):
            raise ValueError("a name or a URL twice")
    return issuers


def _networks(value: str | Sequence[Network]) -> tuple[Network, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return parse_networks("RAGCACHE_ISSUER_NETWORKS", (one.strip() for one in value.split(",")))


def _audit_target(value: str | None) -> str | None:
    if value is not None and value != "stdout" and not os.path.isabs(value):
        raise ValueError("neither stdout nor an absolute path")
    return value


class GatewaySettings(PartSettings):
    """What the gateway reads from its environment."""

    service: ClassVar[str] = "gateway"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the REST server binds."""
    admin_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Second address, which serves every path. Without it, the first address does. With it, the
    first one serves questions, searches, models and health alone."""
    server_tls_dir: ServerCertificateFolder | None = setting(
        None, internal="The operator mounts the Secret of spec.gateway.tls."
    )
    """Folder with the certificate that both addresses show to clients, and its key. Then they serve
    HTTPS alone. The folder is read again when it changes. Without it, they serve plain HTTP."""
    retriever: Address = setting(internal="The operator knows the retriever's Service.")
    """Address of the retriever's gRPC server."""
    engines: Annotated[
        tuple[EngineAddress, ...],
        PlainValidator(_engines),
        Accepts(
            "http://host:port or https://host:port, then ;records=port, ;role=prefill or decode, "
            ";key=file, ;served=name and ;model=number as needed, several with commas between"
        ),
    ] = setting(spec="spec.engines")
    """The engines: where their OpenAI servers are, and the port of each one's records and feed. An
    engine without that port is one without RagCache: it gets no plans, and what it has cached is
    inferred from the prompts that it got. role is what it does for a request, by default all. key
    is a file with its API key, which is read again when it changes. served is the name under which
    it serves its model, if that differs. model is the number of its model: 0 for the one below, 1
    for the first one of RAGCACHE_OTHER_MODELS."""
    cachestore: ShardMembers = setting(internal="The operator mounts the file with the shards.")
    """The shards of the cache store. A file is read again when it changes."""
    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys that the gateway signs reuse plans with, and the tokens with which it calls the other
    parts. The first one signs. The file is read again when it changes. Without it, nothing is
    signed."""
    store_key_file: StoreKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the key."
    )
    """Key that names stored values, as the engines have it. It is read once. Without it, anyone can
    tell the name of a known text's KV."""
    api_keys_file: AbsolutePath | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """TOML file with the hashes of API keys. The file is read again when it changes. Without it,
    requests need no key."""
    builtin_keys: KeyHashes = setting(
        (), internal="The operator has keys for its self-test and for syncs."
    )
    """Hashes of the keys of the platform's own components, beside those of the file."""
    oidc: Annotated[
        tuple[TokenIssuer, ...],
        PlainValidator(_token_issuers),
        Accepts("a JSON list of issuers, each with name, issuer, audiences and what claims give"),
    ] = setting((), internal="The operator writes it from spec.gateway.oidc.")
    """Issuers of JSON Web Tokens that callers may send in place of an API key. Each has a name and
    a URL of its own."""
    issuer_networks: Annotated[
        tuple[Network, ...],
        PlainValidator(_networks),
        Accepts("networks like 10.1.0.0/16, several with commas between"),
    ] = setting((), internal="Only the administrator of the cluster opens networks.")
    """Networks that are not public, and that issuers of tokens may have."""
    audit: (
        Annotated[
            str,
            PlainValidator(_audit_target),
            Accepts("stdout, or the absolute path of a file"),
        ]
        | None
    ) = setting(None, internal="The operator chooses the place by spec.gateway.audit.")
    """Where the audit log goes: standard output, or a file that is only appended to. Without it,
    there is no audit log. While it cannot be written, the gateway changes no documents."""
    audit_max_bytes: ByteQuantity = setting(1 << 30, spec="spec.gateway.audit.maxSize")
    """Most bytes of the files of the audit log. The oldest file is deleted above it."""
    tenant_grace_s: SecondsOrZero = setting(900.0, internal=_BOUND)
    """Time from the last key of a tenant to the deletion of its KV."""
    limits_file: AbsolutePath | None = setting(
        None, internal="The operator mounts the file with spec.gateway.limits."
    )
    """JSON file with limits, which replaces the settings of the same names. The file is read again
    when it changes."""
    model: str = setting(spec="spec.model.source")
    """The model: a folder or a Hugging Face name. The gateway reads its tokenizer and settings, and
    the weights of a folder for their fingerprint. It downloads no weights."""
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
    model_ranks: Count = setting(
        1, internal="The operator sets spec.engines[].tensorParallel where it is above 1."
    )
    """Tensor parallel ranks of each engine of the model, which are a part of the keys of its KV."""
    other_models: Annotated[
        tuple[ModelSettings, ...],
        PlainValidator(_models),
        Accepts("a JSON list of objects with name, source, dtype, max_length and num_ranks"),
    ] = setting((), internal="The operator lists the models of spec.engines[].model.")
    """Further models, which other engines serve. They share documents and the retriever."""
    reuse: Literal["exact", "blend"] = setting("exact", spec="spec.reuse.mode")
    """How stored KV is used where a request does not say it."""
    max_recompute_share: Share = setting(0.2, spec="spec.reuse.maxRecomputeShare")
    """Most that blend recomputes, as a share of the tokens taken from after other prefixes."""
    quality: Share | None = setting(None, spec="spec.reuse.quality")
    """Mean ROUGE-L F1 with full computations that blended answers must reach. Without it, only
    the share above bounds a blend."""
    precision: PrecisionSetting = setting(
        PrecisionPolicy(), internal="The operator derives it from spec.cacheStore.precision."
    )
    """Precisions that the cache store gives to values. Lossy ones are used as far as a report of
    ragcache quality covers them."""
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
    reordering_window_ms: Count = setting(0, spec="spec.gateway.reordering.windowMilliseconds")
    """Questions sent this many milliseconds later may go first in an engine's queue, if more of
    their prompt is cached. 0: questions of one key go in the order in which they were sent."""
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
    slo_first_token_ms: Count | None = setting(None, spec="spec.gateway.slo.firstTokenMilliseconds")
    """Milliseconds from a question to its first token. The gateway answers a question that is
    predicted to take longer with 429. Without it there is no such limit."""
    slo_next_token_ms: Count | None = setting(None, spec="spec.gateway.slo.nextTokenMilliseconds")
    """Milliseconds from one token to the next. No engine gets a question that is predicted to make
    its answers slower. If all would be, the gateway answers with 429. Without it there is no such
    limit."""
    max_connections: Limit = setting(4096, spec="spec.gateway.limits.connections")
    """Connections at once, of each port. A client's address gets at most half of them, and as many
    as it leaves free. The gateway answers one more with 503."""
    header_timeout_s: Seconds = setting(10.0, internal=_BOUND)
    """Time for the header of a request to arrive, from its first byte or the connection."""
    body_max_bytes: Count = setting(8 << 20, internal=_BOUND)
    """Size of one request's body. A question is bounded by what the model holds, too: 16 characters
    for each token, and 256 KiB."""
    bodies_max_bytes: Count = setting(64 << 20, internal=_BOUND)
    """Size of all bodies in memory at once, of questions and of document requests each. A key gets
    at most as much as it leaves free. The gateway answers a body over it with 429."""
    body_timeout_s: Seconds = setting(60.0, internal=_BOUND)
    """Time for the largest body to arrive. Smaller ones have 10 s, and the rest by their size. The
    gateway answers a slower one with 408."""
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

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """Every model, the one of requests without a model first."""
        first = ModelSettings(
            *(self.model_name, self.model, self.model_dtype, self.max_model_len, self.model_ranks)
        )
        return (first, *self.other_models)

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

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        is_encrypted = any(one.is_tls and one.records_port is not None for one in self.engines)
        if is_encrypted and self.tls_dir is None:
            raise InvalidInput(
                variable("tls_dir"),
                f"is not set, but {variable('engines')} has an https engine with records",
                "name the folder with the certificate of this gateway",
            )
        return self
