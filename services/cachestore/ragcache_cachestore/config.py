"""What a cache store is told at start, read from the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragcache_core.errors import InvalidInput

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one cache store.

    listen: "host:port" to serve on. health_listen: the same for health over HTTP; None: not served.
    data_dir: folder that RocksDB owns; created when missing.
    memory_bytes: bound of the memory tier; 0 keeps no values in memory.
    disk_bytes: bound of the values on disk.
    """

    listen: str
    health_listen: str | None
    data_dir: Path
    memory_bytes: int
    disk_bytes: int
    log_level: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Config:
        """Read RAGCACHE_* variables. Raises InvalidInput naming the one that is wrong."""
        log_level = environment.get("RAGCACHE_LOG_LEVEL", "info")
        if log_level not in LOG_LEVELS:
            raise InvalidInput(
                "RAGCACHE_LOG_LEVEL", f"is {log_level!r}", f"set it to one of {LOG_LEVELS}"
            )
        return cls(
            listen=_address(environment, "RAGCACHE_LISTEN"),
            health_listen=_address(environment, "RAGCACHE_HEALTH_LISTEN")
            if environment.get("RAGCACHE_HEALTH_LISTEN")
            else None,
            data_dir=Path(_text(environment, "RAGCACHE_DATA_DIR", "set it to a folder")),
            memory_bytes=_count(environment, "RAGCACHE_MEMORY_BYTES", least=0),
            disk_bytes=_count(environment, "RAGCACHE_DISK_BYTES", least=1),
            log_level=log_level,
        )


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
