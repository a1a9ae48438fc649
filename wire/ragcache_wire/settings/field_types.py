"""Types of settings. A validator takes the variable's text, or a value that a caller passes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from ragcache_core.errors import InvalidInput
from ragcache_core.identity.store_key import StoreKey
from ragcache_core.plan.signature import parse_keys
from ragcache_core.tiering.precision_policy import PrecisionPolicy
from ragcache_wire.peers.certificates import Certificates
from ragcache_wire.settings.table import Accepts, variable
from ragcache_wire.watched.key_lines import DiskKeys
from ragcache_wire.watched.members import Members, members_from
from ragcache_wire.watched.server_certificate import ServerCertificate
from ragcache_wire.watched.signing_keys import SigningKeys

_UNITS: Final = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def _checked_address(value: str) -> str:
    split_address(value)
    return value


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port``; an IPv6 host may have brackets.

    Raises:
        ValueError: It is no such address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def _on_or_off(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ValueError("neither on nor off")
    return value == "on"


def whole_number(value: object) -> int:
    """Return the number that ASCII digits spell; raise ValueError for anything else."""
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or not value.isascii() or not value.isdigit():
        raise ValueError("not a whole number")
    return int(value)


def _quantity(value: object) -> int:
    found = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)?", str(value), re.ASCII)
    if found is None:
        raise ValueError("not a number of bytes")
    return int(found[1]) * _UNITS[found[2]]


def _finite_above_zero(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError("not above 0")
    return value


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("no URL")
    return value


def _comma_separated(value: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, str):
        return tuple(value)
    return tuple(filter(None, (entry.strip() for entry in value.split(","))))


def _precision_policy(value: PrecisionPolicy | str) -> PrecisionPolicy:
    return PrecisionPolicy.parse(value) if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _members(value: Members | str, info: ValidationInfo) -> Members:
    if not isinstance(value, str):
        return value
    assert info.field_name is not None
    return members_from(variable(info.field_name), value)


def _signing_keys(value: SigningKeys | str, info: ValidationInfo) -> SigningKeys:
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    return SigningKeys(Path(value))


def _disk_keys(value: DiskKeys | str) -> DiskKeys:
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    return DiskKeys(Path(value))


def _certificates(value: Certificates | str) -> Certificates:
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    return Certificates(Path(value))


def _server_certificate(value: ServerCertificate | str, info: ValidationInfo) -> ServerCertificate:
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    assert info.field_name is not None
    return ServerCertificate(Path(value), variable(info.field_name))


def _store_key(value: StoreKey | str, info: ValidationInfo) -> StoreKey:
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    assert info.field_name is not None
    name = variable(info.field_name)
    try:
        content = Path(value).read_bytes()
    except OSError as error:
        raise InvalidInput(
            name, f"names a file that cannot be read: {error}", "name a file with one key"
        ) from error
    secret, *others = parse_keys(name, content)
    if others:
        raise InvalidInput(
            name, f"holds {1 + len(others)} keys", "write one: this key cannot be rotated"
        )
    return StoreKey.of_secret(secret)


def _absolute_path(value: Path | str) -> Path:
    if not os.path.isabs(value):
        raise ValueError("not an absolute path")
    return Path(value)


def _key_hashes(value: str | Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, str):
        return tuple(value)
    pairs = (entry.partition("=") for entry in _comma_separated(value))
    return tuple((name, text) for name, _, text in pairs)


def _not_negative(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError("below 0")
    return value


Address = Annotated[str, AfterValidator(_checked_address), Accepts("host:port")]
AbsolutePath = Annotated[
    Path, PlainValidator(_absolute_path), Accepts("the absolute path of a file")
]
KeyHashes = Annotated[
    tuple[tuple[str, str], ...],
    PlainValidator(_key_hashes),
    Accepts("operator=sha256:HASH and sync=ed25519:KEY, with a comma between"),
]
OnOff = Annotated[bool, BeforeValidator(_on_or_off), Accepts("on or off")]
WholeSeconds = Annotated[
    int, BeforeValidator(whole_number), Accepts("a whole number of seconds, 0 or more")
]
Seconds = Annotated[
    float, AfterValidator(_finite_above_zero), Accepts("a number of seconds above 0")
]
SecondsOrZero = Annotated[
    float, AfterValidator(_not_negative), Accepts("a number of seconds, 0 or more")
]
TokenCount = Annotated[
    int, BeforeValidator(whole_number), Field(ge=1), Accepts("a number of tokens, 1 or more")
]
Count = Annotated[int, BeforeValidator(whole_number), Accepts("a whole number, 0 or more")]
Limit = Annotated[
    int, BeforeValidator(whole_number), Field(ge=1), Accepts("a whole number, 1 or more")
]
ByteQuantity = Annotated[int, BeforeValidator(_quantity), Accepts("bytes, as 4294967296 or 4Gi")]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), Accepts("a share from 0 to 1")]
PrecisionSetting = Annotated[
    PrecisionPolicy,
    PlainValidator(_precision_policy),
    Accepts("a JSON object with scheme, grades, shares and max_error"),
]
HttpUrl = Annotated[str, AfterValidator(_http_url), Accepts("a URL like http://collector:4318")]
HostNames = Annotated[
    tuple[str, ...],
    PlainValidator(_comma_separated),
    Accepts("host names, *.NAME or *, several with commas between"),
]
Origins = Annotated[
    tuple[str, ...],
    PlainValidator(_comma_separated),
    Accepts("origins like https://app.example.com, or *, several with commas between"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    BeforeValidator(_lower),
    Accepts("debug, info, warning or error"),
]
LogForm = Literal["text", "json"]
ModelDtype = Literal["auto", "bfloat16", "float16", "float32"]
ShardMembers = Annotated[
    Members,
    PlainValidator(_members),
    Accepts('host:port, several with commas between, or file:PATH of {"members": ["host:port"]}'),
]
StoreKeyFile = Annotated[
    StoreKey,
    PlainValidator(_store_key),
    Accepts("the absolute path of a file with one key (hex or base64, 32 bytes or more)"),
]
SigningKeyFile = Annotated[
    SigningKeys,
    PlainValidator(_signing_keys),
    Accepts("the absolute path of a file with one key a line (hex or base64, 32 bytes or more)"),
]
DiskKeyFile = Annotated[
    DiskKeys,
    PlainValidator(_disk_keys),
    Accepts("the absolute path of a file with one key a line (hex or base64, 32 bytes or more)"),
]
CertificateFolder = Annotated[
    Certificates,
    PlainValidator(_certificates),
    Accepts("the absolute path of a folder with tls.crt, tls.key and ca.crt in PEM"),
]
ServerCertificateFolder = Annotated[
    ServerCertificate,
    PlainValidator(_server_certificate),
    Accepts("the absolute path of a folder with tls.crt and tls.key in PEM"),
]
