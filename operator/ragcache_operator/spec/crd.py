"""Generates the CustomResourceDefinitions of both kinds from the typed specs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from ragcache_operator.spec.collection import KIND as COLLECTION_KIND
from ragcache_operator.spec.collection import RagCollection
from ragcache_operator.spec.consistency import CONSISTENCY
from ragcache_operator.spec.ragcache import KIND, RagCache
from ragcache_operator.spec.rules import CLUSTER_RULES, UPDATE_RULES
from ragcache_operator.spec.status import RagCacheStatus, RagCollectionStatus
from ragcache_operator.spec.validation import CelRule
from ragcache_operator.spec.values import GROUP, VERSION

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PrinterColumn:
    """A column of `kubectl get`. Priority 1 shows it only with ``-o wide``."""

    name: str
    path: str
    description: str
    priority: int = 0
    type: str = "string"


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """One kind of custom resource. ``scale`` holds the field paths of its scale subresource."""

    name: str
    plural: str
    short_names: Sequence[str]
    root: type[BaseModel]
    status: type[BaseModel]
    columns: Sequence[PrinterColumn]
    scale: Mapping[str, str] | None = None

    @property
    def definition_name(self) -> str:
        """Name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


_READY: Final = '.status.conditions[?(@.type=="Ready")].status'
_AGE: Final = PrinterColumn(
    "Age", ".metadata.creationTimestamp", "Time since creation.", type="date"
)

KINDS: Final = (
    ResourceKind(
        KIND,
        "ragcaches",
        ("rgc",),
        RagCache,
        RagCacheStatus,
        (
            PrinterColumn("Ready", _READY, "Whether all components run and the self-test passed."),
            PrinterColumn("Phase", ".status.phase", "Summary of the conditions."),
            PrinterColumn("Engines", ".status.enginesReady", "Ready and desired engine replicas."),
            PrinterColumn(
                "Hit Rate", ".status.cache.hitRate", "Share of reads that found a variant."
            ),
            PrinterColumn("Model", ".status.model", "Name of the served model.", 1),
            PrinterColumn("Endpoint", ".status.endpoints.gateway", "URL of the gateway.", 1),
            PrinterColumn("Progress", ".status.progress", "What the operator waits for.", 1),
            PrinterColumn(
                "Remake",
                ".status.retriever.remakeProgress",
                "Number of documents that have been prepared again.",
                1,
            ),
            _AGE,
        ),
        {
            "specReplicasPath": ".spec.gateway.replicas",
            "statusReplicasPath": ".status.gateway.replicas",
            "labelSelectorPath": ".status.gateway.selector",
        },
    ),
    ResourceKind(
        COLLECTION_KIND,
        "ragcollections",
        ("rgcol",),
        RagCollection,
        RagCollectionStatus,
        (
            PrinterColumn("Ready", _READY, "Whether documents of the collection can be searched."),
            PrinterColumn("Cache", ".spec.cacheRef.name", "RagCache that stores the documents."),
            PrinterColumn(
                "Documents",
                ".status.documents",
                "Number of documents from the sources.",
                type="integer",
            ),
            PrinterColumn(
                "Chunks", ".status.chunks", "Number of chunks of these documents.", 1, "integer"
            ),
            PrinterColumn("Progress", ".status.progress", "Progress of the running sync."),
            PrinterColumn(
                "Synced",
                ".status.lastSyncTime",
                "Time since the last successful sync.",
                type="date",
            ),
            _AGE,
        ),
    ),
)


def definition(kind: ResourceKind) -> dict[str, Any]:
    """Return the CustomResourceDefinition (apiextensions.k8s.io/v1) of a kind."""
    schema = object_schema(kind)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": kind.definition_name,
            "labels": {"app.kubernetes.io/part-of": "ragcache"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": list(kind.short_names),
                # "ragcache" cannot be a category: kubectl resolves the kind's name first.
                "categories": ["all", "rag"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "subresources": {
                        "status": {},
                        **({"scale": dict(kind.scale)} if kind.scale else {}),
                    },
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def _column(column: PrinterColumn) -> dict[str, Any]:
    shown = {
        "name": column.name,
        "type": column.type,
        "description": column.description,
        "jsonPath": column.path,
    }
    return {**shown, "priority": column.priority} if column.priority else shown


def object_schema(kind: ResourceKind) -> Schema:
    """Return the structural schema of a kind's objects."""
    schema = structural(kind.root)
    properties = schema["properties"]
    return {
        **schema,
        "properties": {
            "apiVersion": {"type": "string", "description": "API version of the object."},
            "kind": {"type": "string", "description": "Kind of the object."},
            # A definition may restrict only the name within metadata.
            "metadata": {
                "type": "object",
                "properties": {"name": properties["metadata"]["properties"]["name"]},
            },
            "spec": properties["spec"],
            "status": structural(kind.status),
        },
        # The API server itself requires apiVersion, kind and metadata.
        "required": [name for name in schema["required"] if name == "spec"],
    }


def structural(model: type[BaseModel]) -> Schema:
    """Return a model's schema without references, unions and nulls, as the API server needs it."""
    json_schema = model.model_json_schema(by_alias=True)
    return _SchemaConverter(json_schema.get("$defs", {})).convert(json_schema)


class _SchemaConverter:
    """Converts pydantic's JSON schema to a structural schema. It resolves the references."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions

    def convert(self, given: Schema) -> Schema:
        """Convert the schema of one value."""
        plain = self._resolve(given)
        schema: Schema = {}
        if "description" in plain:
            schema["description"] = " ".join(plain["description"].split())
        for key in _KEPT:
            if key in plain:
                schema[key] = copy.copy(plain[key])
        if "const" in plain:
            schema["enum"] = [plain["const"]]
        if "items" in plain:
            schema["items"] = self.convert(plain["items"])
        map_values = _map_values(plain)
        if map_values is not None:
            schema["additionalProperties"] = self.convert(map_values)
        if "properties" in plain:
            schema["properties"] = {
                name: self.convert(field) for name, field in plain["properties"].items()
            }
        if "default" in plain:
            default = _default(plain["default"], schema)
            # An empty default has no effect, and the server would add it to every object.
            if default or default in (False, 0) or _holds_defaults(schema):
                schema["default"] = default
        rules = _VALIDATIONS.get(plain.get("title", ""), []) if "properties" in plain else []
        if rules:
            schema["x-kubernetes-validations"] = rules
        return schema

    def _resolve(self, given: Schema) -> Schema:
        """Replace a reference or an optional value by its schema. Keys next to it take priority."""
        siblings = {key: value for key, value in given.items() if key not in ("$ref", "anyOf")}
        if "$ref" in given:
            name = given["$ref"].rpartition("/")[2]
            return {**self._resolve(self._definitions[name]), **siblings}
        if "anyOf" in given:
            [value] = [option for option in given["anyOf"] if option != {"type": "null"}]
            # Null means "not given", which needs no default.
            siblings = {k: v for k, v in siblings.items() if (k, v) != ("default", None)}
            siblings.pop("title", None)
            return {**self._resolve(value), **siblings}
        return given


_KEPT = (
    *("type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "required"),
    *("x-kubernetes-int-or-string", "x-kubernetes-list-type"),
    *("x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
    "x-kubernetes-preserve-unknown-fields",
)


def _map_values(plain: Schema) -> Schema | None:
    """Return the schema of a map's values. A structural schema cannot describe the keys."""
    if "patternProperties" in plain:
        [values] = plain["patternProperties"].values()
        return dict(values)
    values = plain.get("additionalProperties")
    return values if isinstance(values, dict) else None


def _default(value: Any, schema: Schema) -> Any:
    """Return a default without the parts that the schema's inner defaults already fill in."""
    if isinstance(value, dict) and "properties" in schema:
        inner = schema["properties"]
        return {
            name: _default(item, inner[name])
            for name, item in value.items()
            if item is not None and not _is_implied(item, inner[name])
        }
    if isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys", ())
        return [
            {**{key: item[key] for key in keys}, **_default(item, schema["items"])}
            if isinstance(item, dict)
            else item
            for item in value
        ]
    return value


def _is_implied(value: Any, schema: Schema) -> bool:
    """Whether the server fills in this value when the field is not given."""
    default = _default(value, schema)
    return default == schema.get("default") or default in ({}, [])


def _holds_defaults(schema: Schema) -> bool:
    return any("default" in inner for inner in schema.get("properties", {}).values())


def _validation(field: str, cel: CelRule) -> dict[str, str]:
    shown = {"rule": cel.expression, "message": cel.message}
    return {**shown, "fieldPath": f".{field}"} if field else shown


def _validations() -> dict[str, list[dict[str, str]]]:
    """Return the CEL rules by the name of their model."""
    found: dict[str, list[dict[str, str]]] = {}
    for rule in (*CONSISTENCY, *CLUSTER_RULES, *UPDATE_RULES):
        if isinstance(rule.cel, CelRule):
            found.setdefault(rule.model.__name__, []).append(_validation(rule.field, rule.cel))
    return found


_VALIDATIONS: Final = _validations()
