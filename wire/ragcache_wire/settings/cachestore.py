"""Settings of the cache store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ragcache_core.errors import InvalidInput
from ragcache_core.eviction import DEFAULT_POLICY, PolicyName
from ragcache_core.eviction.admission import default_admission
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_core.tiering.precision_policy import PrecisionPolicy
from ragcache_wire.settings.field_types import (
    Address,
    DiskKeyFile,
    HttpUrl,
    LogForm,
    LogLevel,
    OnOff,
    PrecisionSetting,
    ShardMembers,
    SigningKeyFile,
    whole_number,
)
from ragcache_wire.settings.part import PartSettings
from ragcache_wire.settings.table import Accepts, setting, variable

_MAX_SOCKET_PATH_BYTES: Final = 107
"""The limit is 108 with the byte that ends the path (unix(7))."""


def _socket(value: Path) -> Path:
    if not value.is_absolute() or len(os.fsencode(value)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError("no path of a socket")
    return value


_TierBytes = Annotated[
    int,
    BeforeValidator(whole_number),
    Field(ge=PAGE_BYTES),
    Accepts(f"a number of bytes, {PAGE_BYTES} or more"),
]


class CacheStoreSettings(PartSettings):
    """What one shard of the cache store reads from its environment."""

    service: ClassVar[str] = "cachestore"

    listen: Address = setting(internal="The operator chooses the port.")
    """Address that the gRPC server binds."""
    health_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address for /healthz, /readyz and /metrics over HTTP. Without it, health is served by gRPC
    alone, and metrics are not served."""
    data_listen: Address | None = setting(None, internal="The operator chooses the port.")
    """Address of the data transport over TCP. Without it, the store does not offer it."""
    data_socket: (
        Annotated[
            Path,
            AfterValidator(_socket),
            Accepts(f"an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes"),
        ]
        | None
    ) = setting(None, internal="The operator chooses the path. Clients need the same folder.")
    """Unix socket of the data transport over shared memory. Each process that can open it shares
    memory with the store. Without it, the store does not offer it."""
    data_dir: Path = setting(internal="The operator mounts the volume.")
    """Folder that the store owns. The store creates it when it is missing."""
    memory_bytes: _TierBytes = setting(spec="spec.cacheStore.memory")
    """Size of the memory tier. Its pages are taken as they are first written to, and kept."""
    owns_memory: OnOff = setting(
        False, internal="The operator sets it where engines share the memory of their pod's shard."
    )
    """Whether the store takes the pages of the memory tier itself before a client writes to them.
    So they count for the memory limit of the store's container, and not for the client's."""
    disk_bytes: _TierBytes = setting(spec="spec.cacheStore.disk.size")
    """Size of the disk tier. The store leaves 64 MiB of the volume free besides."""
    disk_key_file: DiskKeyFile | None = setting(
        None, internal="The operator mounts the Secret of spec.cacheStore.encryption."
    )
    """Keys that encrypt the values on disk. The first one encrypts, and each one decrypts. The file
    is read again when it changes. Values without their key, and plain ones, are dropped at the
    start. Without it, values on disk are plain."""
    policy: PolicyName = setting(DEFAULT_POLICY, spec="spec.cacheStore.policy")
    """What a full tier evicts first."""
    admission: Literal["always", "second-touch", "score"] = setting(
        "always", spec="spec.cacheStore.admission"
    )
    """What is written to the disk. For reuse blend with policy score the default is score."""
    precision: PrecisionSetting = setting(
        PrecisionPolicy(), internal="The operator derives it from spec.cacheStore.precision."
    )
    """Grades of precision, and the share of the variants of each."""
    reuse: Literal["exact", "blend"] = setting("exact", spec="spec.reuse.mode")
    """What the store is used for. exact: a variant outlives the variants after it on its shard.
    blend: each is worth something by itself."""
    cachestore: ShardMembers | None = setting(
        None, internal="The operator mounts the file with the shards."
    )
    """All shards, this one among them. A file is read again when it changes. Without it, this
    shard is the only one."""
    own_address: Address | None = setting(
        None, internal="The operator derives it from the pod's name."
    )
    """Address of this shard among the shards."""
    signing_key_file: SigningKeyFile | None = setting(
        None, internal="The operator mounts the Secret with the keys."
    )
    """Keys of the platform: every caller shows a token under one of them, and so does every
    connection that carries values. The file is read again when it changes. Without it, the store
    has callers on loopback only."""
    replication: OnOff = setting(True, spec="spec.cacheStore.replication.enabled")
    """Whether the shard copies its busiest variants to another shard."""
    otlp_endpoint: HttpUrl | None = setting(None, spec="spec.telemetry.otlp.endpoint")
    """Base URL of an OpenTelemetry collector (OTLP over HTTP). Without it, no telemetry is sent."""
    log_level: LogLevel = setting("info", spec="spec.telemetry.logLevel")
    """Least severe level that is logged."""
    log_format: LogForm = setting("text", spec="spec.telemetry.logs")
    """Format of log lines: text, or one JSON object in each line."""

    @model_validator(mode="before")
    @classmethod
    def _fill_admission(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("policy", "score") != "score" or "admission" in values:
            return values
        leaves_only = values.get("reuse", "exact") == "exact"
        return {**values, "admission": default_admission(leaves_only=leaves_only)}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.cachestore is not None and self.own_address is None:
            raise InvalidInput(
                variable("own_address"), "is not set", "set it to this shard's host:port"
            )
        if self.admission == "score" and self.policy != "score":
            raise InvalidInput(
                variable("admission"),
                f"is score, but the policy is {self.policy}",
                "use policy score",
            )
        return self
