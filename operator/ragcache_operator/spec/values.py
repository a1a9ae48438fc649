"""Field types that both kinds share: names, quantities, Secret references and chunking.

``StringPattern`` and ``Quantity`` define each format once. The parser uses them for error messages,
and the CRD generator uses them for OpenAPI patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import GroupedMetadata, MaxLen, MinLen
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ragcache_operator.spec.quantity import parse_millis, parse_quantity

GROUP = "ragcache.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""A DNS label (RFC 1123), the format of Kubernetes object names."""
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
# The pattern excludes "..", so a path stays below the folder that it is relative to.
_SEGMENT = r"(\.?[^/.\s][^/\s]*)"
_LABEL_TEXT = r"[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?"
RELATIVE_PATH = rf"{_SEGMENT}(/{_SEGMENT})*/?"
# The pattern excludes a user and a password, because credentials belong in a Secret.
HUB_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?"
HUB_COMMIT = rf"{HUB_NAME}(@[0-9a-f]{{40}})?"
"""A model of the hub, and the commit that pins what is loaded."""
CLAIM_FOLDER = rf"{SUBDOMAIN}(/{RELATIVE_PATH})?"
"""A volume claim, or a folder of it."""
LOCAL_FOLDER = r"[^\n]+"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
HTTP_URL = rf"https?://([^\s/?#@:\[\]]+|\[[0-9A-Fa-f:.]+\])(:{_PORT})?(/[^\s?#]*)?"


def validation_error(problem: str, fix: str) -> PydanticCustomError:
    """Return a pydantic error with the problem and the fix that the user reads."""
    return PydanticCustomError("refused", "refused", {"problem": problem, "fix": fix})


@dataclass(frozen=True, slots=True)
class StringPattern:
    """Validates a string by a regular expression that Python and Go both accept.

    ``noun`` names the format in error messages ("DNS label"). ``fix`` tells what to write instead.
    """

    pattern: str
    noun: str
    fix: str

    def check(self, text: str) -> str:
        """Return the text, or raise a validation error."""
        if not re.fullmatch(self.pattern, text, re.ASCII):
            raise validation_error(f"{text!r} is not a valid {self.noun}", self.fix)
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
    """Validates a Kubernetes quantity above zero, given as a string or an integer."""

    # At least one digit is not 0, in the notation that parse_quantity reads.
    _PATTERN: ClassVar = (
        r"^\+?(?:[0-9]*[1-9][0-9]*(?:\.[0-9]*)?|[0-9]*\.[0-9]*[1-9][0-9]*)"
        r"(?:[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
    )

    def __init__(self, kind: str, example: str) -> None:
        """Set the unit ("bytes" or "cores") and an example for error messages."""
        self._kind = kind
        self._example = example

    def _check(self, given: object) -> str:
        fix = f"write {self._kind} as a Kubernetes quantity, like {self._example}"
        if isinstance(given, bool) or not isinstance(given, (str, int)):
            raise validation_error(f"{str(given)!r} is not a quantity", fix)
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
    """Adds keys to a field's OpenAPI schema."""

    keys: Mapping[str, Any]

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), **self.keys}


@dataclass(frozen=True, slots=True, eq=False)
class ServerList(GroupedMetadata):
    """Bounds a list, and tells the API server how it merges. Items of a map have unique names."""

    max_items: int
    min_items: int = 0
    kind: Literal["atomic", "set", "map"] = "atomic"

    def __iter__(self) -> Iterator[object]:
        keys = {"x-kubernetes-list-map-keys": ["name"]} if self.kind == "map" else {}
        yield Strict(strict=False)
        if self.min_items:
            yield MinLen(self.min_items)
        yield MaxLen(self.max_items)
        yield ServerSchema({"x-kubernetes-list-type": self.kind, **keys})


DNS_LABEL = StringPattern(
    LABEL,
    "DNS label",
    "use lower-case letters, digits and '-', with a letter or digit at both ends",
)
# A limit of 40 leaves room for "-engine-" and an engine's name in a Service name (63 characters).
ObjectName = Annotated[str, Field(max_length=40), DNS_LABEL]
EngineName = Annotated[str, Field(max_length=15), DNS_LABEL]
Namespace = Annotated[str, Field(max_length=63), DNS_LABEL]
# The name of an object that the user owns: a Secret, a claim, a class.
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
HostPattern = Annotated[
    str,
    Field(max_length=255),
    StringPattern(
        rf"\*|(\*\.)?{SUBDOMAIN}",
        "host name",
        "write it like rag.example.com, or *.example.com for all names below, or * for all",
    ),
]
EngineUrl = Annotated[
    str,
    Field(max_length=300),
    StringPattern(
        rf"http://{SUBDOMAIN}:{_PORT}|https://{SUBDOMAIN}(:{_PORT})?",
        "URL of an engine",
        "write it like http://vllm.models.svc:8000 or https://llm.example.com, without a path",
    ),
]
IssuerUrl = Annotated[
    str,
    Field(max_length=512),
    StringPattern(
        rf"https://{SUBDOMAIN}(:{_PORT})?(/[^\s?#]*)?"
        rf"|http://(localhost|127\.0\.0\.1)(:{_PORT})?(/[^\s?#]*)?",
        "URL of an issuer",
        "write it like https://id.example.com/realms/docs; only this machine may have http",
    ),
]
ExtendedResource = Annotated[
    str,
    Field(max_length=128),
    StringPattern(
        rf"{SUBDOMAIN}/{_LABEL_TEXT}",
        "extended resource",
        "write it like nvidia.com/gpu or nvidia.com/mig-3g.40gb",
    ),
]
ServedName = Annotated[
    str,
    Field(max_length=200),
    StringPattern(
        r"[^\s,;]+", "model name", "use no spaces, no ',' and no ';', like meta/llama-3.1-8b"
    ),
]
WebOrigin = Annotated[
    str,
    Field(max_length=512),
    StringPattern(
        r"\*|[a-z][-+.a-z0-9]*://[^\s/,]+",
        "origin",
        "write it like https://app.example.com, without a path, or * for all",
    ),
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
AnnotationKey = Annotated[
    str,
    Field(max_length=317),
    StringPattern(
        rf"({SUBDOMAIN}/)?{_LABEL_TEXT}",
        "key of an annotation",
        "write it like team or example.com/team",
    ),
]
Labels = Annotated[
    Mapping[LabelKey, LabelValue],
    Field(max_length=32),
    ServerSchema({"x-kubernetes-map-type": "atomic"}),
]
Annotations = Annotated[
    Mapping[AnnotationKey, Annotated[str, Field(max_length=8192)]],
    Field(max_length=32),
    ServerSchema({"x-kubernetes-map-type": "atomic"}),
]
IpBlock = Annotated[
    str,
    Field(max_length=43),
    StringPattern(r"[0-9a-fA-F.:]+/[0-9]{1,3}", "block of addresses", "write it like 10.0.0.0/8"),
]
RelativePath = Annotated[
    str,
    Field(max_length=1024),
    StringPattern(
        rf"\.|{RELATIVE_PATH}",
        "relative folder",
        "write it like docs/handbook, without '..' and without a leading '/'",
    ),
]
ByteQuantity = Annotated[str, Quantity("bytes", "512Mi or 2Gi")]
CpuQuantity = Annotated[str, Quantity("cores", "250m or 2")]
Port = Annotated[int, Field(ge=1, le=65535)]
Replicas = Annotated[int, Field(ge=1, le=64)]


class ManifestModel(BaseModel):
    """A mapping in a manifest: camelCase keys, no unknown keys, no type conversion."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        # The API server rejects a quoted number, so the parser does too.
        strict=True,
        # `kubectl explain` and the reference show the string below each field.
        use_attribute_docstrings=True,
    )


class SecretKey(ManifestModel):
    """SecretKey selects one entry of a Secret. The operator never copies its value."""

    name: ForeignName
    """Name of the Secret in the namespace of this object."""
    key: SecretEntry = "token"
    """Key in the Secret's data that holds the value."""


class ApiKeySecret(SecretKey):
    """ApiKeySecret selects one entry of a Secret that holds an API key."""

    key: SecretEntry = "key"
    """Key in the Secret's data that holds the value."""


class UrlSecret(SecretKey):
    """UrlSecret selects one entry of a Secret that holds a URL, with its user and password."""

    key: SecretEntry = "url"
    """Key in the Secret's data that holds the value."""


class StorageSpec(ManifestModel):
    """StorageSpec describes a volume claim."""

    size: ByteQuantity = "10Gi"
    """Requested size of each volume claim, like 10Gi."""
    class_name: ForeignName | None = None
    """Storage class of the claim. If unset, the cluster's default class applies."""

    @property
    def size_bytes(self) -> int:
        """Requested size in bytes."""
        return parse_quantity(self.size)


class ResourcesSpec(ManifestModel):
    """ResourcesSpec overrides the resources that the operator derives."""

    cpu: CpuQuantity | None = None
    """CPU request in cores, like 250m or 2. If unset, the component's default applies."""
    cpu_limit: CpuQuantity | None = None
    """CPU limit in cores. If unset, there is none, because a limit only delays answers. A namespace
    whose ResourceQuota has limits.cpu needs one for every component and for syncJobs."""
    memory: ByteQuantity | None = None
    """Memory request, like 4Gi. If unset, the operator derives it; see docs/sizing.md."""
    memory_limit: ByteQuantity | None = None
    """Memory limit. If unset, a component that bounds its own memory gets its request as the
    limit. Other components get no limit."""

    @property
    def cpu_millis(self) -> int | None:
        """CPU request in thousandths of a core, if given."""
        return None if self.cpu is None else parse_millis(self.cpu)

    @property
    def cpu_limit_millis(self) -> int | None:
        """CPU limit in thousandths of a core, if given."""
        return None if self.cpu_limit is None else parse_millis(self.cpu_limit)

    @property
    def memory_bytes(self) -> int | None:
        """Memory request in bytes, if given."""
        return None if self.memory is None else parse_quantity(self.memory)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Memory limit in bytes, if given."""
        return None if self.memory_limit is None else parse_quantity(self.memory_limit)


class ChunkingSpec(ManifestModel):
    """ChunkingSpec sets how the retriever splits documents into chunks."""

    size: Annotated[int, Field(ge=16, le=4096)] = 256
    """Maximum number of tokens in a chunk. The serving model's tokenizer counts them."""
    overlap: Annotated[int, Field(ge=0, le=2047)] = 32
    """Maximum number of tokens that a chunk repeats from the previous chunk. It must be less than
    half of size."""
    window: Annotated[int, Field(ge=0, le=8)] = 1
    """Number of neighbouring chunks on each side that a search returns with each hit."""


class ObjectMeta(BaseModel):
    """The metadata fields that the operator reads. The API server validates the rest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    name: ObjectName
    namespace: Namespace = "default"
    uid: str | None = None
    """Unique id that the API server assigns. Children refer to it. None outside a cluster."""
