"""The parser under random input: it returns a value, or a list of problems with fixes."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import RagCollection
from ragcache_operator.spec.crd import KINDS, object_schema
from ragcache_operator.spec.manifest import InvalidManifest, parse
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.rules import find_problems
from tests.kit.manifests import Object, cache, collection, golden_specs

SCHEMAS = [object_schema(kind) for kind in KINDS]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["hf:a/b", "1Gi", "main", "5m", "."]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def field_names(schema: Object) -> Iterator[str]:
    """Yield every field name in a schema."""
    for name, field in schema.get("properties", {}).items():
        yield name
        yield from field_names(field.get("items", field))


NAMES = sorted({name for schema in SCHEMAS for name in field_names(schema)})


def problems_of(manifest: Object) -> list[str]:
    """Return the fields of all problems. Fail on other exceptions and on problems without a fix."""
    before = repr(manifest)
    problems: tuple[InvalidInput, ...] = ()
    try:
        value = parse(manifest)
    except InvalidManifest as error:
        problems = error.problems
    assert repr(manifest) == before
    for problem in problems:
        assert problem.field
        assert problem.problem
        assert problem.fix
        assert str(problem) == f"{problem.field}: {problem.problem}; {problem.fix}"
    if not problems:
        again = json.loads(value.model_dump_json(by_alias=True, exclude_none=True))
        assert parse(again) == value
    return [problem.field for problem in problems]


@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(NAMES), json_values, max_size=5))
@example({"metadata": {"name": "\ud800"}})
@example({"kind": "RagCollection", "spec": []})
def test_anything_is_a_value_or_problems(manifest: Object) -> None:
    assert problems_of(manifest)


def patterned() -> dict[str, TypeAdapter[Any]]:
    """Return every string type with a pattern, by the first field that uses it."""
    found: dict[str, TypeAdapter[Any]] = {}
    seen = set()
    models: list[type[BaseModel]] = [RagCache, RagCollection]
    for model in models:
        for name, field in model.model_fields.items():
            models += [m for m in models_in(field.annotation) if m not in models]
            adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
            schema = adapter.json_schema()
            [option, *_] = schema.get("anyOf", [schema])
            if "pattern" in option and str(option) not in seen:
                seen.add(str(option))
                found[f"{model.__name__}.{name}"] = adapter
    return found


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


@pytest.mark.parametrize(("name", "adapter"), patterned().items(), ids=lambda x: str(x)[:40])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_server_and_parser_take_the_same_strings(
    name: str, adapter: TypeAdapter[Any], data: st.DataObject
) -> None:
    schema = adapter.json_schema()
    [option, *_] = schema.get("anyOf", [schema])
    pattern = option["pattern"].replace("$", r"\Z")
    text = data.draw(
        st.from_regex(pattern, alphabet=st.characters(codec="ascii"))
        | st.text("aZ0-._/:@ \n?#m", max_size=12)
    )
    on_server = (
        re.search(pattern, text) is not None
        and option.get("minLength", 0) <= len(text) <= option["maxLength"]
    )
    taken = True
    try:
        adapter.validate_python(text)
    except ValidationError:
        taken = False
    # Only the parser rejects quantities above 63 bits. A pattern on the server cannot.
    assert taken == on_server or (on_server and "x-kubernetes-int-or-string" in option), name


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) in a manifest."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield value, key
            yield from entries(item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield value, i
            yield from entries(item)


GOOD = [
    *(cache(**spec) | {"status": {"phase": "Ready"}} for spec in golden_specs().values()),
    collection(
        sources=[
            {"volume": {"claimName": "c", "path": "docs"}},
            {"git": {"url": "https://e.com/a.git", "bearerSecret": {"name": "s"}}},
        ],
        sync={"interval": "1h"},
        lexicalWeight=0.25,
        labels=False,
    ),
]


@st.composite
def mutated(draw: st.DrawFn) -> Object:
    """Return a valid manifest with some values replaced, dropped or renamed."""
    manifest = copy.deepcopy(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(list(entries(manifest))))
        match draw(st.sampled_from(["replace", "drop", "rename"])):
            case "replace":
                container[key] = draw(json_values)
            case "drop":
                del container[key]
            case "rename" if isinstance(container, dict):
                container[draw(st.text(max_size=8) | st.sampled_from(NAMES))] = container.pop(key)
    return manifest


def test_the_manifests_to_mutate_are_good() -> None:
    for manifest in GOOD:
        assert problems_of(manifest) == []
        assert find_problems(manifest) == []


@given(mutated())
@settings(max_examples=150, deadline=None)
def test_any_change_gives_a_value_or_problems(manifest: Object) -> None:
    problems_of(manifest)


@given(mutated())
@settings(max_examples=100, deadline=None)
def test_every_problem_in_a_cluster_has_a_fix(manifest: Object) -> None:
    for problem in find_problems(manifest):
        assert problem.field
        assert problem.problem
        assert problem.fix
