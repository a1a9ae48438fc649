"""What a cache store is told at start, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragcache_core.errors import InvalidInput
from ragcache_core.eviction import DEFAULT_POLICY, POLICY_NAMES
from ragcache_core.eviction.admission import ADMISSION_NAMES, default_admission
from ragcache_core.identity.variant import Precision
from ragcache_core.storage.extents import PAGE_BYTES
from ragcache_wire.tracing import otlp_endpoint
from ragcache_wire.watched.members import Members, members_from

NATIVE = Precision()
LOG_LEVELS = ("debug", "info", "warning", "error")
REUSE = ("exact", "blend")

_MAX_SOCKET_PATH_BYTES = 107
"""Of a Unix socket, with the byte that ends it 108 (unix(7))."""


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one cache store.

    listen: "host:port" to serve on. health_listen: the same for health over HTTP; None: not served.
    lane_listen, data_socket: TCP address and Unix socket of the data transports; None: not offered.
    data_dir: folder that the store owns; created when missing. memory_bytes, disk_bytes: bounds of
    the tiers. policy, admission: names, of ``ragcache_core``. precision: what every value is to be
    held in at most, or who decides on that (``ragcache_core.tiering``). leaves_only: whether a
    parent outlives its children in a tier (``exact``). members: the shards of the store, None for
    the only one; own_address: which of them this is. replication: whether hot values are copied to
    other shards. otlp_endpoint: base URL of an OpenTelemetry collector; None: nothing is sent.
    """

    listen: str
    health_listen: str | None
    data_dir: Path
    memory_bytes: int
    disk_bytes: int
    log_level: str = "info"
    policy: str = DEFAULT_POLICY
    admission: str = "always"
    precision: Literal["harag", "score"] | Precision = NATIVE
    leaves_only: bool = True
    lane_listen: str | None = None
    data_socket: Path | None = None
    members: Members | None = None
    own_address: str | None = None
    replication: bool = True
    otlp_endpoint: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Config:
        """Read RAGCACHE_* variables. Raises InvalidInput naming the one that is wrong."""
        members = environment.get("RAGCACHE_CACHESTORE")
        if members:
            _text(environment, "RAGCACHE_OWN_ADDRESS", "set it to this shard's host:port")
        policy = _choice(environment, "RAGCACHE_POLICY", POLICY_NAMES, DEFAULT_POLICY)
        leaves_only = _choice(environment, "RAGCACHE_REUSE", REUSE, "exact") == "exact"
        by_default = default_admission(leaves_only=leaves_only) if policy == "score" else "always"
        admission = _choice(environment, "RAGCACHE_ADMISSION", ADMISSION_NAMES, by_default)
        if admission == "score" and policy != "score":
            raise InvalidInput(
                "RAGCACHE_ADMISSION", f"is score, but the policy is {policy}", "use policy score"
            )
        return cls(
            listen=_address(environment, "RAGCACHE_LISTEN"),
            health_listen=_optional_address(environment, "RAGCACHE_HEALTH_LISTEN"),
            data_dir=Path(_text(environment, "RAGCACHE_DATA_DIR", "set it to a folder")),
            memory_bytes=_count(environment, "RAGCACHE_MEMORY_BYTES", least=PAGE_BYTES),
            disk_bytes=_count(environment, "RAGCACHE_DISK_BYTES", least=PAGE_BYTES),
            log_level=_choice(environment, "RAGCACHE_LOG_LEVEL", LOG_LEVELS, "info"),
            policy=policy,
            admission=admission,
            precision=_precision(environment, "RAGCACHE_PRECISION"),
            leaves_only=leaves_only,
            lane_listen=_optional_address(environment, "RAGCACHE_DATA_LISTEN"),
            data_socket=_socket(environment, "RAGCACHE_DATA_SOCKET"),
            members=members_from("RAGCACHE_CACHESTORE", members) if members else None,
            own_address=_optional_address(environment, "RAGCACHE_OWN_ADDRESS"),
            replication=_choice(environment, "RAGCACHE_REPLICATION", ("on", "off"), "on") == "on",
            otlp_endpoint=otlp_endpoint(environment),
        )


def _optional_address(environment: Mapping[str, str], name: str) -> str | None:
    return _address(environment, name) if environment.get(name) else None


def _address(environment: Mapping[str, str], name: str) -> str:
    value = _text(environment, name, "set it to host:port")
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(name, f"is {value!r}", "set it to host:port")
    return value


def _text(environment: Mapping[str, str], name: str, fix: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise InvalidInput(name, "is not set", fix)
    return value


def _count(environment: Mapping[str, str], name: str, least: int) -> int:
    fix = f"set it to a number of bytes, at least {least}"
    value = _text(environment, name, fix)
    if not value.isdecimal() or int(value) < least:
        raise InvalidInput(name, f"is {value!r}", fix)
    return int(value)


def _choice(environment: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    value = environment.get(name) or default
    if value not in choices:
        raise InvalidInput(name, f"is {value!r}", f"set it to one of {', '.join(choices)}")
    return value


def _precision(environment: Mapping[str, str], name: str) -> Literal["harag", "score"] | Precision:
    value = environment.get(name) or str(NATIVE)
    match value:
        case "harag":
            return "harag"
        case "score":
            return "score"
    try:
        return Precision.parse(value)
    except ValueError as error:
        raise InvalidInput(
            name,
            f"is {value!r}",
            'set it to harag, to score, or to a precision like "native" or "int8/int4"',
        ) from error


def _socket(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(name)
    if not value:
        return None
    if not os.path.isabs(value) or len(os.fsencode(value)) > _MAX_SOCKET_PATH_BYTES:
        raise InvalidInput(
            name,
            f"is {value!r}",
            f"set it to an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes",
        )
    return Path(value)
