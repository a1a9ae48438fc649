"""CEL rules of the CustomResourceDefinitions, evaluated as an API server does from 1.28 on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import celpy
import pytest
import re2
from celpy.adapter import json_to_cel
from celpy.celtypes import BoolType

from ragcache_operator.spec.consistency import CelRule
from ragcache_operator.spec.crd import KINDS, ResourceKind, object_schema
from ragcache_operator.spec.rules import UPDATE_RULES, find_problems
from tests.helpers.operator_manifests import BAD, Bad, Layer, Object, cache, collection
from tests.unit.operator.spec.test_crd import DEFAULTED, Schema, kinds, nodes, with_defaults
from tests.unit.operator.spec.test_rules import EVERY, broken_by

RULE_KEYS = {"rule", "message", "fieldPath"}
# Names that a schema may give a field, but that CEL would have escaped.
RESERVED = {
    *("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for"),
    *("function", "if", "import", "let", "loop", "package", "namespace", "return", "var"),
    *("void", "while"),
}
# What API servers allow one rule, for all places that it may be asked at, and all rules at once.
RULE_BUDGET = 10_000_000
DEFINITION_BUDGET = 100_000_000
# A string without maxLength may fill a request.
LONGEST_STRING = 3 * 1024 * 1024
BYTES_PER_CHARACTER = 4
# At least one matches the pattern of any string that a rule reads.
TEXTS = (
    *("", "a", "bundled:tinyrag", "bundled:all-minilm-l6-v2", "hf:a", "path:a", "http://e/v1"),
    *("5s", "10s", "--model", "--port", "--api-key", "--config"),
)

SCHEMAS = {kind.name: object_schema(kind) for kind in KINDS}
ENVIRONMENT = celpy.Environment()
PROGRAMS = {
    rule["rule"]: ENVIRONMENT.program(ENVIRONMENT.compile(rule["rule"]))
    for schema in SCHEMAS.values()
    for _, node in nodes(schema)
    for rule in node.get("x-kubernetes-validations", ())
}

GOOD: list[tuple[Object, Object | None]] = [
    *((manifest, None) for manifest in DEFAULTED),
    *((manifest, manifest) for manifest in DEFAULTED),
    *((bad.manifest, None) for bad in BAD if bad.old is not None),
    (collection(collection="handbook"), collection()),
    (collection(), collection(collection="handbook")),
    (collection(prune=False), collection()),
    (cache(model={"name": "m"}, engines=[{"name": "b"}]), cache(cacheStore={"shards": 2})),
    (cache(model={"source": "pvc:models/llama", "maxLength": 8192}), None),
    (cache(engines=[{"args": ["--max-num-seqs", "8", "--hostess", "x--port"]}]), None),
    (cache(scheduling={"tolerations": [{"operator": "Exists"}]}), None),
    (cache(scheduling={"tolerations": [{"key": "a", "effect": "NoExecute"}]}), None),
    (
        cache(
            scheduling={
                "tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 5}]
            },
            networkPolicy={
                "clients": [
                    {
                        "namespaceSelector": {
                            "matchExpressions": [
                                {"key": "a", "operator": "NotIn", "values": ["b"]},
                                {"key": "a", "operator": "Exists"},
                                {"key": "a", "operator": "DoesNotExist", "values": []},
                            ]
                        }
                    }
                ]
            },
        ),
        None,
    ),
    *((collection(sync={"interval": interval}), None) for interval in ("10s", "1h30m", "24h")),
]


def holds(expression: str, value: Any, old: Any = None) -> bool:
    """What the rule says of a stored value. Raises CELEvalError where it reads what is missing."""
    context = {"self": json_to_cel(value)}
    if old is not None:
        context["oldSelf"] = json_to_cel(old)
    answer = PROGRAMS[expression].evaluate(context)
    assert isinstance(answer, BoolType), expression
    return bool(answer)


def unsupported_features(new: Object, old: Object | None = None) -> list[tuple[str, str]]:
    """Path and message of every rule that refuses a manifest. old: what an update replaces."""
    schema = SCHEMAS[new["kind"]]
    before = None if old is None else with_defaults(old, schema)
    return list(_refusals(with_defaults(new, schema), before, schema, ""))


def _refusals(value: Any, old: Any, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if is_transition(rule["rule"]) and old is None:
            continue
        if not holds(rule["rule"], value, old):
            yield f"{path}{rule.get('fieldPath', '')}".strip("."), rule["message"]
    if isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is not None:
                yield from _refusals(item, (old or {}).get(name), inner, f"{path}.{name}")
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for i, item in enumerate(value):
            same = [
                other for other in (old or []) if keys and all(other[k] == item[k] for k in keys)
            ]
            before = same[0] if same else None
            yield from _refusals(item, before, schema["items"], f"{path}[{i}]")


def is_transition(expression: str) -> bool:
    return re.search(r"\boldSelf\b", expression) is not None


def ruled(schema: Schema) -> Iterator[tuple[str, Schema, int]]:
    """Every schema that has rules, with its path and how often one object may hold it."""
    for path, node in nodes(schema):
        if "x-kubernetes-validations" in node:
            yield path, node, _times(schema, path)


def _times(schema: Schema, path: str) -> int:
    times = 1
    for name in path.split(".")[1:]:
        schema = schema["properties"][name.removesuffix("[]").removesuffix("{}")]
        if name.endswith("[]"):
            times *= int(schema["maxItems"])
            schema = schema["items"]
        elif name.endswith("{}"):
            times *= int(schema["maxProperties"])
            schema = schema["additionalProperties"]
    return times


def paths_read(expression: str) -> list[list[str]]:
    """What an expression reads, in has() as well: self or oldSelf, and the fields below it."""
    bare = re.sub(r"'[^']*'", "''", expression)
    # A name before a parenthesis is a function's.
    found = re.findall(r"\b(?:self|oldSelf)\b(?:\.\w+\b(?!\())*", bare)
    return [path.split(".") for path in found]


@pytest.mark.parametrize(("new", "old"), GOOD, ids=range(len(GOOD)))
def test_good_objects_are_let_through(new: Object, old: Object | None) -> None:
    assert unsupported_features(new, old) == []


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.layer is Layer.CEL], ids=lambda bad: bad.name
)
def test_each_is_refused_by_its_rule_and_no_other(bad: Bad) -> None:
    [(rule, field)] = broken_by(bad)
    assert isinstance(rule.cel, CelRule)
    [(path, message)] = unsupported_features(bad.manifest, bad.old)
    assert message == rule.cel.message
    assert re.sub(r"\[\d+\]", "", path) == re.sub(r"\[\d+\]", "", field)
    # CEL blames a list of arguments where the parser knows which of them it is.
    assert path in (bad.field, bad.field.removesuffix("[0]"))


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.layer is Layer.WEBHOOK], ids=lambda bad: bad.name
)
def test_what_is_left_to_the_webhook_passes(bad: Bad) -> None:
    assert unsupported_features(bad.manifest, bad.old) == []


def test_every_problem_comes_at_once() -> None:
    bad = cache(
        model={"source": "path:/models", "tokenSecret": {"name": "t"}},
        engines=[{"name": "a"}, {"name": "b", "args": ["--port", "1"]}],
    )
    assert [path for path, _ in unsupported_features(bad)] == [
        "spec.model.tokenSecret",
        "spec.model.source",
        "spec.engines[1].args",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        *("--port", "--port=1", "--max-model-len=9", "--max_model_len", "--kv_transfer-config={}"),
        *("--kv-transfer-config.kv_connector", "--kv-transfer-config.kv_role=x", "--kv_tr.kv_role"),
        *("--kv-transfer-con={}", "--served-model", "--dt=half", "--por", "--ho=x", "--serv"),
        *("--api-key=x", "--api_k", "--config=/f", "--uds", "--root-path=/v1", "--grpc"),
        *("--ssl-keyfile", "--ssl_certf=/f", "--tokens-only", "--headless", "--ssl-"),
    ],
)
def test_every_spelling_of_an_argument_is_seen(argument: str) -> None:
    bad = cache(engines=[{"args": ["--max-num-seqs=8", argument]}])
    # Where it is short for several, so may several rules be broken.
    assert {path for path, _ in unsupported_features(bad)} == {"spec.engines[0].args"}
    assert {problem.field for problem in find_problems(bad)} == {"spec.engines[0].args[1]"}


@pytest.mark.parametrize(
    "argument",
    [
        *(
            "--portal",
            "port",
            "-port",
            "--max+model+len",
            "--hosts=1",
            "-",
            "--",
            "--=1",
            "host=--",
        ),
        *("--max-num-seqs", "--max_model_length", "--model-impl", "--model_impl=vllm", "--modelx"),
        *(
            "--config-format",
            "--kv-transfer-config-x",
            "--kv-cache-dtype",
            "--dtypes",
            "--grpc-port",
        ),
        *(
            "--api-server-count=1",
            "--ssl-ciphers",
            "--ssl-ca-certs",
            "--master-port",
            "--tokenizer",
        ),
        *("--tensor-parallel-size", "-O3", "-tp=2", "--speculative-config.model=x", "--lora-dtype"),
    ],
)
def test_arguments_that_only_look_alike_pass(argument: str) -> None:
    good = cache(engines=[{"args": [argument]}])
    assert unsupported_features(good) == []
    assert find_problems(good) == []


def test_every_volume_stays() -> None:
    bigger = {"size": "99Gi"}
    new = cache(retriever={"storage": bigger}, cacheStore={"disk": {"className": "fast"}})
    assert [path for path, _ in unsupported_features(new, cache())] == [
        "spec.retriever.storage",
        "spec.cacheStore.disk",
    ]


def test_the_definitions_have_every_rule() -> None:
    shown = {
        (rule["rule"], rule["message"])
        for schema in SCHEMAS.values()
        for _, node, _ in ruled(schema)
        for rule in node["x-kubernetes-validations"]
    }
    assert shown == {
        (rule.cel.expression, rule.cel.message) for rule in EVERY if isinstance(rule.cel, CelRule)
    }


def test_transitions_are_the_rules_that_see_the_old_value() -> None:
    seen = {rule.cel.expression for rule in EVERY if isinstance(rule.cel, CelRule)}
    assert {expression for expression in seen if is_transition(expression)} == {
        transition.cel.expression for transition in UPDATE_RULES
    }


@kinds
def test_defaults_keep_the_rules(kind: ResourceKind) -> None:
    """An API server refuses a definition whose defaults break its rules."""
    for path, schema in nodes(SCHEMAS[kind.name]):
        if "default" in schema:
            value = with_defaults(schema["default"], schema)
            assert list(_refusals(value, None, schema, path)) == []


def samples(schema: Schema) -> list[Any]:
    """Values of a schema that rules may tell apart."""
    if "enum" in schema:
        return list(schema["enum"])
    match schema["type"]:
        case "object":
            fields = schema["properties"]
            required = {name: samples(fields[name])[0] for name in schema.get("required", ())}
            return [with_defaults(required, schema)]
        case "array":
            return [[], *([item] for item in samples(schema["items"]))]
        case "integer":
            return [schema["minimum"], schema.get("maximum", 600)]
    fewest = schema.get("minLength", 0)
    return [
        text for text in TEXTS if len(text) >= fewest and re.search(schema.get("pattern", ""), text)
    ]


@kinds
def test_rules_answer_whatever_is_left_out(kind: ResourceKind) -> None:
    """Reading a field that is not there is an error, which would refuse the object in bad words."""
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            if is_transition(rule["rule"]):
                continue
            choices = []
            for name in sorted({read[1] for read in paths_read(rule["rule"])}):
                field = schema["properties"][name]
                given = [{name: value} for value in samples(field)]
                choices.append(given if is_there(name, schema) else [{}, *given])
            answers = [
                holds(rule["rule"], {name: item for one in chosen for name, item in one.items()})
                for chosen in itertools.product(*choices)
            ]
            assert set(answers) == {True, False}, path


@kinds
def test_optional_fields_are_read_behind_has(kind: ResourceKind) -> None:
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            guarded = re.findall(r"\bhas\(([.\w]+)\)", rule["rule"])
            for read in paths_read(rule["rule"]):
                at = schema
                for i, name in enumerate(read[1:], start=2):
                    assert is_there(name, at) or ".".join(read[:i]) in guarded, path
                    at = known(at, name)


@kinds
def test_rules_read_no_field_that_cel_would_escape(kind: ResourceKind) -> None:
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            for name in itertools.chain(*paths_read(rule["rule"])):
                assert name not in RESERVED, path
                assert "__" not in name, path


def is_there(name: str, schema: Schema) -> bool:
    """Whether every stored value has the field."""
    known_field = name in schema.get("required", ()) or "default" in known(schema, name)
    return known_field or name == "metadata"


def known(schema: Schema, name: str) -> Schema:
    """Schema of a field; of an object's metadata, rules may read the name whatever is said."""
    field = schema["properties"][name]
    assert isinstance(field, dict)
    if name == "metadata":
        return {"required": ["name"], "properties": {"name": {"type": "string"}}}
    return field


@kinds
def test_rules_blame_fields_by_plain_paths(kind: ResourceKind) -> None:
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            assert rule.keys() <= RULE_KEYS, path
            assert re.fullmatch(r"(\.[a-zA-Z]\w*)+", rule.get("fieldPath", ".self")), path
            at = schema
            for name in rule.get("fieldPath", "").split(".")[1:]:
                at = at["properties"][name]


@kinds
def test_old_values_are_found_wherever_rules_compare_them(kind: ResourceKind) -> None:
    """An item of a list has an old value only by its key, and none of our rules asks for one."""
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        if any(is_transition(rule["rule"]) for rule in schema["x-kubernetes-validations"]):
            assert "[]" not in path
            assert "{}" not in path


@kinds
def test_regular_expressions_are_ones_that_re2_reads(kind: ResourceKind) -> None:
    for path, schema in nodes(SCHEMAS[kind.name]):
        if "pattern" in schema:
            assert re2.compile(schema["pattern"]), path
        for rule in schema.get("x-kubernetes-validations", ()):
            for pattern in re.findall(r"\.matches\('([^']*)'\)", rule["rule"]):
                assert "\\" not in pattern, path
                assert re2.compile(pattern), path


@kinds
def test_rules_cost_what_servers_allow(kind: ResourceKind) -> None:
    total = 0
    for path, schema, times in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            cost = times * worst_cost(rule["rule"], schema)
            assert cost < RULE_BUDGET, f"{path}: {rule['rule']}"
            total += cost
    assert 0 < total < DEFINITION_BUDGET


def worst_cost(expression: str, schema: Schema) -> int:
    """More than servers estimate: a step per character of the expression, a tenth per byte of a
    string, a quarter of that per character of a regular expression, and all of it per item."""
    cost, items = len(expression), 1
    item: Schema = {}
    for read in paths_read(expression):
        at = schema
        for name in read[1:]:
            at = known(at, name)
        if at["type"] == "array":
            items, item = at["maxItems"], at["items"]
        elif at["type"] == "string":
            cost += most_bytes(at) // 10 + 1
    for pattern in re.findall(r"\.matches\('([^']*)'\)", expression):
        cost += (most_bytes(item) // 10 + 1) * (len(pattern) // 4 + 1)
    return cost * items


def most_bytes(schema: Schema) -> int:
    if "enum" in schema:
        return max(len(value) for value in schema["enum"])
    return int(schema.get("maxLength", LONGEST_STRING)) * BYTES_PER_CHARACTER
