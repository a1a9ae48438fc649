"""CustomResourceDefinitions: valid on every API server, and consistent with the typed specs."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from ragcache_operator.spec.crd import KINDS, ResourceKind, definition, object_schema
from ragcache_operator.spec.manifest import parse
from ragcache_operator.spec.ragcache import RagCache
from tests.kit.manifests import cache, collection, examples, source

ROOT = Path(__file__).parents[4]

Schema = dict[str, Any]

# The keywords of JSON schema and OpenAPI that structural schemas may use.
FREE = "x-kubernetes-preserve-unknown-fields"
"""The API server keeps whatever a mapping has."""
KEYWORDS = {
    FREE,
    *("type", "format", "description", "default", "enum", "pattern", "required"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "properties", "items", "additionalProperties"),
    *("x-kubernetes-int-or-string", "x-kubernetes-validations", "x-kubernetes-map-type"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}

TYPES = ("object", "array", "string", "integer", "number", "boolean")

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every schema within a schema, with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return a value as the API server stores it: it fills a mapping before its fields."""
    if isinstance(value, dict):
        filled = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in filled and "default" in field:
                filled[name] = copy.deepcopy(field["default"])
        return {
            name: with_defaults(item, schema.get("properties", {}).get(name, {}))
            for name, item in filled.items()
        }
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


@kinds
def test_every_schema_is_structural(kind: ResourceKind) -> None:
    for path, schema in nodes(object_schema(kind)):
        assert schema.keys() <= KEYWORDS, path
        if schema.get("x-kubernetes-int-or-string"):
            assert "type" not in schema, path
        else:
            assert schema["type"] in TYPES, path
        assert ("items" in schema) == (schema.get("type") == "array"), path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        if schema.get("type") == "object":
            # A server drops unknown fields, so a mapping without properties would stay empty.
            kept = "additionalProperties" in schema or schema.get(FREE)
            assert schema.get("properties") or kept, path
        for name in schema.get("required", ()):
            assert name in schema["properties"], path


@kinds
def test_everything_in_a_spec_is_bounded(kind: ResourceKind) -> None:
    """The API server estimates CEL costs from bounds, and rejects a definition without them."""
    for path, schema in nodes(object_schema(kind)["properties"]["spec"]):
        match schema.get("type"):
            case "string":
                assert "maxLength" in schema or "enum" in schema, path
            case "array":
                assert "maxItems" in schema, path
            case "integer":
                assert "minimum" in schema, path
            case "number":
                assert {"minimum", "maximum"} <= schema.keys(), path
            case "object":
                assert "properties" in schema or "maxProperties" in schema, path


@kinds
def test_every_list_has_a_merge_type(kind: ResourceKind) -> None:
    for path, schema in nodes(object_schema(kind)):
        if schema.get("type") == "array":
            merge = schema["x-kubernetes-list-type"]
            assert merge in ("atomic", "set", "map"), path
            for key in schema.get("x-kubernetes-list-map-keys", ()):
                item = schema["items"]
                assert key in item.get("required", ()) or "default" in item["properties"][key]


@kinds
def test_every_field_is_described(kind: ResourceKind) -> None:
    schema = object_schema(kind)
    assert schema["description"]
    for part in ("spec", "status"):
        for path, node in nodes(schema["properties"][part], part):
            for name, field in node.get("properties", {}).items():
                said = field.get("description", "")
                assert said.endswith("."), f"{path}.{name}"
                assert said[0].isupper() or ":" in said or said.startswith("metadata."), path
                assert "\n" not in said, f"{path}.{name}"


@kinds
def test_patterns_are_valid_in_go(kind: ResourceKind) -> None:
    for path, schema in nodes(object_schema(kind)):
        pattern = schema.get("pattern")
        if pattern is not None:
            re.compile(pattern)
            assert pattern.startswith("^"), path
            assert pattern.endswith("$"), path
            # No lookaround, no back references, no classes that Python and Go define differently.
            assert not re.search(r"\(\?[=!<P]|\\[1-9bBdDwWZA]", pattern), path


@kinds
def test_cel_names_fields_that_exist(kind: ResourceKind) -> None:
    found = 0
    for path, schema in nodes(object_schema(kind)):
        for rule in schema.get("x-kubernetes-validations", ()):
            found += 1
            at = schema
            for name in rule.get("fieldPath", "").split(".")[1:]:
                at = at["properties"][name]
            for name in re.findall(
                r"self\.(\w+)(?![\w(])", rule["rule"].replace("oldSelf", "self")
            ):
                assert name in schema["properties"] or name in ("spec", "metadata"), path
    assert found


@kinds
@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_definitions_are_valid_objects(kind: ResourceKind, version: str) -> None:
    kubernetes_validate.validate(definition(kind), version, strict=True)


@kinds
def test_columns_and_scale_point_at_fields(kind: ResourceKind) -> None:
    [version] = definition(kind)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        if path == ".metadata.creationTimestamp":
            continue
        at = schema
        for name in path.replace('[?(@.type=="Ready")]', "[]").split(".")[1:]:
            at = at["properties"][name.removesuffix("[]")]
            at = at["items"] if name.endswith("[]") else at
        assert at["type"] in ("string", "integer")


DEFAULTED = [
    cache(),
    cache(model={}, gateway={}, retriever={"embedder": {}}, engines=[{}], cacheStore={"disk": {}}),
    cache(gateway={"autoscaling": {"maxReplicas": 3}, "resources": {}, "ingress": {"host": "a.b"}}),
    cache(model={"source": "hf:a/b", "tokenSecret": {"name": "hub"}}),
    cache(
        retriever={
            "embedder": {"source": "http://e/v1", "model": "m", "keySecret": {"name": "k"}},
        },
        engines=[{"name": "a", "autoscaling": {"maxReplicas": 2}}, {"name": "b"}],
        podTemplate={"tolerations": [{"key": "a"}]},
        networkPolicy={"clients": [{"podSelector": {}}]},
    ),
    cache(reuse={"mode": "blend"}),
    # The server stores 1.0 as 1.
    cache(reuse={"maxRecomputeShare": 1}),
    collection(),
    collection(chunking={}, sync={}),
    collection(lexicalWeight=1),
    source(volume={"claimName": "c"}),
    source(git={"url": "https://example.com/a.git", "bearerSecret": {"name": "s"}}),
    *examples(),
]


@pytest.mark.parametrize("manifest", DEFAULTED, ids=range(len(DEFAULTED)))
def test_the_servers_defaults_are_the_parsers(manifest: dict[str, Any]) -> None:
    [kind] = [kind for kind in KINDS if kind.name == manifest["kind"]]
    stored = with_defaults(manifest, object_schema(kind))
    assert parse(stored) == parse(manifest)
    # The server adds every default, so readers of the object in the cluster see all of them.
    dumped = parse(manifest).model_dump(
        mode="json", by_alias=True, exclude_none=True, include={"spec"}
    )
    assert without_empty(stored["spec"]) == without_empty(dumped["spec"])


def without_empty(value: Any) -> Any:
    """Return a value without empty mappings and lists, which are defaults."""
    if isinstance(value, dict):
        slim = {key: without_empty(item) for key, item in value.items()}
        return {key: item for key, item in slim.items() if item not in ({}, [])}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def test_a_status_is_ignored() -> None:
    assert isinstance(parse(cache() | {"status": {"phase": "Ready"}}), RagCache)


def test_generated_files_are_up_to_date() -> None:
    subprocess.run([sys.executable, "tools/generate_crds.py", "--check"], cwd=ROOT, check=True)
