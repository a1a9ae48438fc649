"""Settings of the engine's connector. vLLM itself has arguments."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from ragcache_core.tiering.precision_policy import PrecisionPolicy
from ragcache_wire.settings.field_types import (
    Address,
    ByteQuantity,
    Count,
    HttpUrl,
    OnOff,
    PrecisionSetting,
    Seconds,
    ShardMembers,
    SigningKeyFile,
    StoreKeyFile,
    TokenCount,
)
from ragcache_wire.settings.part import PartSettings
from ragcache_wire.settings.table import setting

RECOMPUTE_SLICE_TOKENS: Final = 256
"""More delays the next tokens of requests that decode meanwhile."""

LOAD_DEADLINE_S: Final = 5.0

_MEASURED: Final = "Benchmarks and tests set it; the default is the measured best."


class EngineSettings(PartSettings):
    """What the connector reads from the environment of a vLLM server."""

    service: ClassVar[str] = "engine"

    cachestore: ShardMembers = setting(internal="The operator mounts the file with the shards.")
    """The shards of the cache store. A file is read again when it changes."""
    records_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address where the engine serves the records of its requests and what its caches have. Without
    it, it serves neither."""
    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys of the platform: the engine acts only on plans that one of them signed, and every caller
    shows a token under one of them. The file is read again when it changes. Without it, the engine
    acts on any plan, and has callers on loopback only."""
    store_key_file: StoreKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the key."
    )
    """Key that names stored values and proves who has computed them. It is read once. Without it,
    anyone can tell the name of a known text's KV, and the engine uses any value of the store."""
    precision: PrecisionSetting = setting(
        PrecisionPolicy(), internal="The operator derives it from spec.cacheStore.precision."
    )
    """Precisions that the cache store gives to values. The engine tags a value in each of them."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP) for spans and metrics. Without it,
    none are sent."""
    metrics_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address of a port that serves /metrics alone. vLLM's server serves it too."""

    device: Literal["cpu", "cuda"] = setting("cpu", spec="spec.engines[].device")
    """Where the engine has weights and KV: in host memory, or in a GPU's. It decides how much host
    memory the engine needs."""
    host_tier_bytes: ByteQuantity = setting(0, spec="spec.engines[].hostTier")
    """Host memory for values, pinned where there is a GPU. 0: none."""
    memory_request_bytes: ByteQuantity | None = setting(
        None, internal="The kubelet fills in the memory request of the container."
    )
    """Memory that the scheduler reserves for the engine, which does not start with less than it
    needs. Without it, only the memory limit and the machine's memory count."""
    device_pool_bytes: ByteQuantity = setting(
        0, internal="The RagCache offers no device with a pool yet."
    )
    """Device memory for values, next to vLLM's own KV cache. 0: none."""
    tier_policy: Literal["score", "thresholds"] = setting("score", internal=_MEASURED)
    """What decides which values are in host memory and on the device. score: by uses and age.
    thresholds: by the ranks of HA-RAG."""

    lookup_wait_s: Seconds = setting(0.005, internal=_MEASURED)
    """How long one scheduling step waits for the store's lookups, for all requests together."""
    lookup_deadline_s: Seconds = setting(
        0.5, internal="A fixed bound; tests on slow machines raise it."
    )
    """Time after which a lookup counts as a miss."""
    load_deadline_s: Seconds = setting(
        LOAD_DEADLINE_S, internal="A fixed bound, which tests lower."
    )
    """Most time for a load. The engine recomputes what has not arrived by then. A load gets less
    where computing takes little."""
    save_deadline_s: Seconds = setting(30.0, internal="A fixed bound.")
    """Most time for a save."""
    observe_deadline_s: Seconds = setting(60.0, internal="A fixed bound.")
    """How long blocks of a finished request are kept for attention scores of its chunks."""
    hang_s: Seconds = setting(
        120.0, internal="It bounds a hang, and no load that a user could tune for."
    )
    """Time for one step, after which the server's health is 503. A step over a full batch of a
    large model takes a minute on a CPU."""

    min_load_tokens: Count = setting(64, internal=_MEASURED)
    """Fewer tokens than this are computed rather than loaded. A load costs a round trip and an
    idle engine step or two."""
    recompute_slice_tokens: TokenCount = setting(RECOMPUTE_SLICE_TOKENS, internal=_MEASURED)
    """Most tokens of a blend that are recomputed in one step next to other requests, which decode
    one token in it."""
    save_queue_bytes: Count = setting(1 << 30, internal="A fixed bound of memory.")
    """Memory for values that wait to be sent to the store. What does not fit is not saved."""
    load_always: OnOff = setting(False, internal="Benchmarks and tests measure loads with it.")
    """Whether the engine loads KV even where computing is predicted to be faster."""
    plain_prefixes: OnOff = setting(
        True, internal="Benchmarks and tests turn it off to compute a prompt in full."
    )
    """Whether the engine loads and saves exact prefixes of requests that carry no plan."""
    layerwise: OnOff = setting(False, internal="It pays on GPUs, which the RagCache offers later.")
    """Whether a request starts as soon as its first layers are loaded."""
