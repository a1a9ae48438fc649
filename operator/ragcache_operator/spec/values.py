"""Values that both objects are made of: names, quantities, secrets, chunking.

What a value must look like is said once, for the parser (in words, with a fix) and for the API
server (as a pattern): see ``Matches`` and ``Quantity``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ragcache_operator.spec.quantity import parse_millis, parse_quantity

GROUP = "ragcache.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label (RFC 1123), as Kubernetes has them in names."""
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
# Without "..", so that it stays below the folder it is relative to.
_SEGMENT = r"(\.?[^/.\s][^/\s]*)"
_LABEL_TEXT = r"[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?"
RELATIVE_PATH = rf"{_SEGMENT}(/{_SEGMENT})*/?"
# Without a user and a password: those belong into a Secret.
HTTP_URL = r"https?://[^\s/?#@]+(/[^\s?#]*)?"


def validation_error(problem: str, fix: str) -> PydanticCustomError:
    """A validator's objection in the two halves that every error here has."""
    return PydanticCustomError("refused", "refused", {"problem": problem, "fix": fix})


@dataclass(frozen=True, slots=True)
class StringPattern:
    """A string's pattern, in what Python's and Go's regular expressions have in common.

    noun: what the string is to be ("DNS label"). fix: what to write instead.
    """

    pattern: str
    noun: str
    fix: str

    def check(self, text: str) -> str:
        """The text; objects with a refusal."""
        if not re.fullmatch(self.pattern, text, re.ASCII):
            raise validation_error(f"{text!r} is no {self.noun}", self.fix)
        return text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}


class Quantity:
    """A Kubernetes quantity above zero, written as a string or a whole number; kept as a string."""

    # With a digit that is not 0, in the notation that parse_quantity reads.
    _PATTERN: ClassVar = (
        r"^\+?(?:[0-9]*[1-9][0-9]*(?:\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)"
        r"(?:[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
    )

    def __init__(self, kind: str, example: str) -> None:
        """kind: "bytes" or "cores". example: some, as a manifest would have them."""
        self._kind = kind
        self._example = example

    def _check(self, given: object) -> str:
        fix = f"write {self._kind} as Kubernetes does, like {self._example}"
        if isinstance(given, bool) or not isinstance(given, (str, int)):
            raise validation_error(f"{str(given)!r} is no quantity", fix)
        text = str(given)
        try:
            parse_quantity(text)
            positive = parse_millis(text) > 0
        except ValueError as error:
            raise validation_error(str(error), fix) from error
        if not positive:
            raise validation_error(
                f"{text} is not above zero", f"write a value like {self._example}"
            )
        return text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "x-kubernetes-int-or-string": True,
            "pattern": self._PATTERN,
            "maxLength": 64,
            "minimum": 1,
        }


@dataclass(frozen=True, slots=True, eq=False)
class ServerSchema:
    """Keys that the API server's schema has of a value beyond those of its type."""

    keys: Mapping[str, Any]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), **self.keys}


DNS_LABEL = StringPattern(
    LABEL,
    "DNS label",
    "use lower-case letters, digits and '-', with a letter or digit at both ends",
)
# 40 leaves room for "-engine-" and an engine's name within a Service's 63 characters.
ObjectName = Annotated[str, Field(max_length=40), DNS_LABEL]
EngineName = Annotated[str, Field(max_length=15), DNS_LABEL]
Namespace = Annotated[str, Field(max_length=63), DNS_LABEL]
# Of an object that is not ours: a Secret, a claim, a class.
ForeignName = Annotated[
    str,
    Field(max_length=253),
    StringPattern(
        SUBDOMAIN,
        "object name",
        "use lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
    ),
]
HostName = Annotated[
    str,
    Field(max_length=253),
    StringPattern(SUBDOMAIN, "host name", "write it like rag.example.com"),
]
SecretEntry = Annotated[
    str,
    Field(max_length=253),
    StringPattern(r"[-._A-Za-z0-9]+", "key of a Secret", "use letters, digits, '-', '_' and '.'"),
]
LabelKey = Annotated[
    str,
    Field(max_length=317),
    StringPattern(
        rf"({SUBDOMAIN}/)?{_LABEL_TEXT}", "key of a label", "write it like disk or example.com/disk"
    ),
]
LabelValue = Annotated[
    str,
    Field(max_length=63),
    StringPattern(
        rf"({_LABEL_TEXT})?",
        "value of a label",
        "use letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    ),
]
RelativePath = Annotated[
    str,
    Field(max_length=1024),
    StringPattern(
        rf"\.|{RELATIVE_PATH}",
        "folder below the source's own",
        "write it like docs/handbook, without '..' and without a '/' in front",
    ),
]
ByteQuantity = Annotated[str, Quantity("bytes", "512Mi or 2Gi")]
CpuQuantity = Annotated[str, Quantity("cores", "250m or 2")]
Port = Annotated[int, Field(ge=1, le=65535)]
Replicas = Annotated[int, Field(ge=1, le=64)]


class ManifestModel(BaseModel):
    """A mapping of a manifest: camelCase names, nothing unknown, nothing converted."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        # A quoted number is refused, as the API server refuses it.
        strict=True,
        # What follows a field as a string is what `kubectl explain` and the reference say.
        use_attribute_docstrings=True,
    )


class SecretKey(ManifestModel):
    """One entry of a Secret in the object's own namespace. Its value is never copied."""

    name: ForeignName
    """Name of the Secret, in the namespace of this object."""
    key: SecretEntry = "token"
    """Which entry of the Secret's data holds the value."""


class ApiKeySecret(SecretKey):
    """An entry of a Secret that holds an API key."""

    key: SecretEntry = "key"
    """Which entry of the Secret's data holds the value."""


class StorageSpec(ManifestModel):
    """A volume."""

    size: ByteQuantity = "10Gi"
    """Bytes to ask for in each volume claim, like 10Gi."""
    class_name: ForeignName | None = None
    """Storage class of the claim. Without it, the cluster's default class."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return parse_quantity(self.size)


class ResourcesSpec(ManifestModel):
    """What a pod asks for, in place of what follows from the cache sizes."""

    cpu: CpuQuantity | None = None
    """Cores to request, like 250m or 2. Without it, the part's own default."""
    memory: ByteQuantity | None = None
    """Bytes of memory to request, like 4Gi. Without it, what the part's cache sizes need."""
    memory_limit: ByteQuantity | None = None
    """Bytes of memory at which the pod is killed. Without it, a part that bounds its own memory
    has its request as limit, and any other has none."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory to request in bytes, if given."""
        return None if self.memory is None else parse_quantity(self.memory)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit in bytes, if given."""
        return None if self.memory_limit is None else parse_quantity(self.memory_limit)


class ChunkingSpec(ManifestModel):
    """How documents are cut, in tokens of the serving model."""

    size: Annotated[int, Field(ge=16, le=4096)] = 256
    """Most tokens of one chunk, counted by the serving model's tokenizer."""
    overlap: Annotated[int, Field(ge=0, le=2047)] = 32
    """Most tokens that a chunk repeats from the one before it; less than half of size."""
    window: Annotated[int, Field(ge=0, le=8)] = 1
    """Neighbouring chunks of the same document that a hit brings along, on each side."""


class ObjectMeta(BaseModel):
    """What is read of an object's metadata; the API server judges the rest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    name: ObjectName
    namespace: Namespace = "default"
    uid: str | None = None
    """The API server's own name for the object, which its children refer to; None before it."""
