"""From the typed specs to CustomResourceDefinitions: what the API server knows of the two kinds."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from ragcache_operator.spec import (
    COLLECTION_KIND,
    GROUP,
    KIND,
    VERSION,
    RagCache,
    RagCollection,
)
from ragcache_operator.spec.consistency import CONSISTENCY, CelRule, Rule
from ragcache_operator.spec.rules import CLUSTER_RULES, UPDATE_RULES, UpdateRule
from ragcache_operator.spec.status import RagCacheStatus, RagCollectionStatus

Schema = dict[str, Any]

_CONDITION: Final = '.status.conditions[?(@.type=="{}")].status'


@dataclass(frozen=True, slots=True)
class PrinterColumn:
    """A column of `kubectl get`. priority 1: only with -o wide."""

    name: str
    path: str
    type: str
    description: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """One kind of object. scale: paths of the scale subresource."""

    name: str
    plural: str
    short_names: Sequence[str]
    root: type[BaseModel]
    status: type[BaseModel]
    columns: Sequence[PrinterColumn]
    scale: Mapping[str, str] | None = None

    @property
    def definition_name(self) -> str:
        """Name of its CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


_AGE: Final = PrinterColumn("Age", ".metadata.creationTimestamp", "date", "Time since it was made.")

KINDS: Final = (
    ResourceKind(
        KIND,
        "ragcaches",
        ("rgc",),
        RagCache,
        RagCacheStatus,
        (
            PrinterColumn(
                "Ready",
                _CONDITION.format("Ready"),
                "string",
                "Whether a question was answered and every part runs.",
            ),
            PrinterColumn("Phase", ".status.phase", "string", "The conditions in one word."),
            PrinterColumn(
                "Engines", ".status.enginesReady", "string", "Engines ready, of those wanted."
            ),
            PrinterColumn(
                "Hit Rate", ".status.cache.hitRate", "string", "Share of reads that hit."
            ),
            PrinterColumn("Model", ".status.model", "string", "Name of the serving model.", 1),
            PrinterColumn(
                "Endpoint", ".status.endpoints.gateway", "string", "URL of the gateway.", 1
            ),
            PrinterColumn("Progress", ".status.progress", "string", "What is being waited for.", 1),
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
            PrinterColumn(
                "Ready",
                _CONDITION.format("Ready"),
                "string",
                "Whether the collection holds what the sources hold.",
            ),
            PrinterColumn(
                "Cache", ".spec.cacheRef.name", "string", "RagCache that keeps the documents."
            ),
            PrinterColumn(
                "Documents", ".status.documents", "integer", "Documents from the sources."
            ),
            PrinterColumn("Chunks", ".status.chunks", "integer", "Chunks of these documents.", 1),
            PrinterColumn("Progress", ".status.progress", "string", "How far the running sync is."),
            PrinterColumn(
                "Synced", ".status.lastSyncTime", "date", "Time since the last good sync."
            ),
            _AGE,
        ),
    ),
)


def definition(kind: ResourceKind, *, cel: bool = True) -> dict[str, Any]:
    """The kind's CustomResourceDefinition, apiextensions.k8s.io/v1.

    cel: whether with CEL rules. A server older than 1.28 does not know all of their fields: it
    drops those when a definition is posted, but refuses to apply it.
    """
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
                # "ragcache" would be the kind's own name, which kubectl takes first.
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
                    "schema": {"openAPIV3Schema": schema if cel else _without_cel(schema)},
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
    """Structural schema of the kind's objects."""
    schema = structural(kind.root)
    properties = schema["properties"]
    return {
        **schema,
        "properties": {
            "apiVersion": {"type": "string", "description": "The version that fields are of."},
            "kind": {"type": "string", "description": "The kind of object."},
            # Of metadata, a definition may restrict no more than the name.
            "metadata": {
                "type": "object",
                "properties": {"name": properties["metadata"]["properties"]["name"]},
            },
            "spec": properties["spec"],
            "status": structural(kind.status),
        },
        # The API server asks for the first three itself.
        "required": [name for name in schema["required"] if name == "spec"],
    }


def _without_cel(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_cel(value)
            for key, value in schema.items()
            if key != "x-kubernetes-validations"
        }
    return [_without_cel(item) for item in schema] if isinstance(schema, list) else schema


def structural(model: type[BaseModel]) -> Schema:
    """A model's schema as the API server takes it: without references, unions or nulls."""
    given = model.model_json_schema(by_alias=True)
    return _Converter(given.get("$defs", {})).convert(given)


class _Converter:
    """Rewrites pydantic's JSON schema; definitions: what its references name."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions

    def convert(self, given: Schema) -> Schema:
        """Schema of one value."""
        plain = self._resolved(given)
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
        values = _values(plain)
        if values is not None:
            schema["additionalProperties"] = self.convert(values)
        if "properties" in plain:
            schema["properties"] = {
                name: self.convert(field) for name, field in plain["properties"].items()
            }
        if "default" in plain:
            default = _default(plain["default"], schema)
            # An empty default says nothing and would stand in every object.
            if default or default in (False, 0) or _holds_defaults(schema):
                schema["default"] = default
        rules = _VALIDATIONS.get(plain.get("title", ""), []) if "properties" in plain else []
        if rules:
            schema["x-kubernetes-validations"] = rules
        return schema

    def _resolved(self, given: Schema) -> Schema:
        """Given with its reference or its optional value in place; what stands beside it wins."""
        beside = {key: value for key, value in given.items() if key not in ("$ref", "anyOf")}
        if "$ref" in given:
            name = given["$ref"].rpartition("/")[2]
            return {**self._resolved(self._definitions[name]), **beside}
        if "anyOf" in given:
            [value] = [option for option in given["anyOf"] if option != {"type": "null"}]
            # A null is "not given", which needs no default.
            beside = {k: v for k, v in beside.items() if (k, v) != ("default", None)}
            beside.pop("title", None)
            return {**self._resolved(value), **beside}
        return given


_KEPT = (
    *("type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "required"),
    *("x-kubernetes-int-or-string", "x-kubernetes-list-type"),
    *("x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
)


def _values(plain: Schema) -> Schema | None:
    """Schema of a map's values; what its keys look like, the server's schemas cannot say."""
    if "patternProperties" in plain:
        [values] = plain["patternProperties"].values()
        return dict(values)
    values = plain.get("additionalProperties")
    return values if isinstance(values, dict) else None


def _default(value: Any, schema: Schema) -> Any:
    """The default without what the schema's inner defaults say, which the server fills in."""
    if isinstance(value, dict) and "properties" in schema:
        inner = schema["properties"]
        return {
            name: _default(item, inner[name])
            for name, item in value.items()
            if item is not None and not _is_said(item, inner[name])
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


def _is_said(value: Any, schema: Schema) -> bool:
    """Whether the server makes value of nothing."""
    default = _default(value, schema)
    return default == schema.get("default") or default in ({}, [])


def _holds_defaults(schema: Schema) -> bool:
    return any("default" in inner for inner in schema.get("properties", {}).values())


def _validation(field: str, cel: CelRule) -> dict[str, str]:
    shown = {"rule": cel.expression, "message": cel.message}
    return {**shown, "fieldPath": f".{field}"} if field else shown


def _validations() -> dict[str, list[dict[str, str]]]:
    """CEL rules by the name of the model that they are about."""
    found: dict[str, list[dict[str, str]]] = {}
    rules: Sequence[Rule | UpdateRule] = (*CONSISTENCY, *CLUSTER_RULES, *UPDATE_RULES)
    for rule in rules:
        if isinstance(rule.cel, CelRule):
            found.setdefault(rule.model.__name__, []).append(_validation(rule.field, rule.cel))
    return found


_VALIDATIONS: Final = _validations()
