"""CEL rules of the CustomResourceDefinitions, evaluated as an API server does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import celpy
import pytest
import re2
from celpy.adapter import json_to_cel
from celpy.celtypes import BoolType, IntType
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.spec.cel import compile_cel
from ragcache_operator.spec.crd import KINDS, ResourceKind, object_schema
from ragcache_operator.spec.engine_arguments import ALLOWED_FLAGS, ENGINE_ARGUMENT_RULES
from ragcache_operator.spec.quantity import parse_millis
from ragcache_operator.spec.rules import UPDATE_RULES, find_problems
from ragcache_operator.spec.validation import CelRule
from tests.kit.manifests import (
    BAD,
    Bad,
    Object,
    RejectedBy,
    cache,
    collection,
    external,
)
from tests.unit.operator.spec.test_crd import DEFAULTED, Schema, kinds, nodes, with_defaults
from tests.unit.operator.spec.test_rules import EVERY, RULES, broken_by

RULE_KEYS = {"rule", "message", "fieldPath"}
# Words that CEL reserves. A rule would have to escape a field of such a name.
RESERVED = {
    *("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for"),
    *("function", "if", "import", "let", "loop", "package", "namespace", "return", "var"),
    *("void", "while"),
}
# The API server's cost limits: for one rule with all its occurrences, and for all rules.
RULE_BUDGET = 10_000_000
DEFINITION_BUDGET = 100_000_000
# A string without maxLength can be as large as a request.
LONGEST_STRING = 3 * 1024 * 1024
BYTES_PER_CHARACTER = 4
# For each string that a rule reads, at least one of these texts matches the pattern.
TEXTS = (
    *(
        "",
        "a",
        "bundled:tinyrag",
        "bundled:all-minilm-l6-v2",
        "hf:a",
        "path:a",
        "pvc:a",
        "http://e/v1",
    ),
    "https://e/v1",
    *("5s", "10s", "--model", "--port", "--api-key", "--config", "--nnodes", "--revision"),
    *(
        "http://e:80",
        *("A", "RAGCACHE_A", "10.0.0.0/8"),
        "none",
        "bundled",
        "cross-encoder",
        "--kv-cache-dtype",
        "--kv-offloading-size",
        "--seed=1",
    ),
)

SCHEMAS = {kind.name: object_schema(kind) for kind in KINDS}
# Those over arguments are functions in Python, which name the argument and its fix.
IN_PYTHON = {
    rule.cel.expression
    for rule in RULES
    if isinstance(rule.cel, CelRule) and rule not in ENGINE_ARGUMENT_RULES
}
UPDATE_CEL = [rule.cel for rule in UPDATE_RULES if isinstance(rule.cel, CelRule)]
ENVIRONMENT = celpy.Environment()
# The API server's library of quantities.
FUNCTIONS: dict[str, Any] = {
    "quantity": lambda text: IntType(parse_millis(str(text))),
    "compareTo": lambda one, other: IntType((one > other) - (one < other)),
}
PROGRAMS = {
    rule["rule"]: ENVIRONMENT.program(ENVIRONMENT.compile(rule["rule"]), functions=FUNCTIONS)
    for schema in SCHEMAS.values()
    for _, node in nodes(schema)
    for rule in node.get("x-kubernetes-validations", ())
}

SHARED: Object = {"backend": {"postgres": {"urlSecret": {"name": "db"}}}}

GOOD: list[tuple[Object, Object | None]] = [
    *((manifest, None) for manifest in DEFAULTED),
    *((manifest, manifest) for manifest in DEFAULTED),
    *((bad.manifest, None) for bad in BAD if bad.old is not None),
    (collection(collection="handbook"), collection()),
    (collection(), collection(collection="handbook")),
    (collection(prune=False), collection()),
    (cache(model={"name": "m"}, engines=[{"name": "b"}]), cache(cacheStore={"shards": 2})),
    (cache(model={"source": "pvc:models/llama", "maxLength": 8192}), None),
    (cache(engines=[{"args": ["--max-num-seqs=8"], "unsafeArgs": ["--hostess=x--port"]}]), None),
    (external(name="theirs", args=[], replicas=1), None),
    (cache(podTemplate={"tolerations": [{"operator": "Exists"}]}), None),
    (cache(podTemplate={"tolerations": [{"key": "a", "effect": "NoExecute"}]}), None),
    (
        cache(
            podTemplate={
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
    (cache(retriever=SHARED | {"replicas": 2}), cache(retriever=SHARED | {"replicas": 3})),
    (cache(retriever={"reranker": {"source": "http://e/v1", "model": "m"}}), cache()),
    (cache(retriever={"reranker": {"source": "cross-encoder", "model": "a/b"}}), None),
    (cache(retriever={"reranker": {"source": "cross-encoder", "model": "pvc:a.b/c-d/e"}}), None),
    (cache(retriever={"reranker": {"source": "http://e/v1", "model": "any: name"}}), None),
    (
        cache(retriever={"backend": {"milvus": {"urlSecret": {"name": "b"}}}}),
        cache(retriever={"backend": {"milvus": {"urlSecret": {"name": "a"}}}}),
    ),
    *((collection(sync={"interval": interval}), None) for interval in ("10s", "1h30m", "24h")),
]


def holds(expression: str, value: Any, old: Any = None) -> bool:
    """Evaluate a rule on a stored value. Raises CELEvalError if the rule reads a missing field."""
    context = {"self": json_to_cel(value)}
    if old is not None:
        context["oldSelf"] = json_to_cel(old)
    answer = PROGRAMS[expression].evaluate(context)
    assert isinstance(answer, BoolType), expression
    return bool(answer)


def cel_problems(new: Object, old: Object | None = None) -> list[tuple[str, str]]:
    """Return path and message of every CEL rule that a manifest (or an update of old) breaks."""
    schema = SCHEMAS[new["kind"]]
    before = None if old is None else with_defaults(old, schema)
    return list(_cel_problems(with_defaults(new, schema), before, schema, ""))


def _cel_problems(value: Any, old: Any, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get("x-kubernetes-validations", ()):
        if compares_with_old(rule["rule"]) and old is None:
            continue
        if not holds(rule["rule"], value, old):
            yield f"{path}{rule.get('fieldPath', '')}".strip("."), rule["message"]
    if isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is not None:
                yield from _cel_problems(item, (old or {}).get(name), inner, f"{path}.{name}")
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        for i, item in enumerate(value):
            same = [
                other for other in (old or []) if keys and all(other[k] == item[k] for k in keys)
            ]
            before = same[0] if same else None
            yield from _cel_problems(item, before, schema["items"], f"{path}[{i}]")


def compares_with_old(expression: str) -> bool:
    return re.search(r"\boldSelf\b", expression) is not None


def ruled(schema: Schema) -> Iterator[tuple[str, Schema, int]]:
    """Yield every schema with rules, its path and how often one object can contain it."""
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
    """Return the paths that an expression reads, also in has(): self or oldSelf, and fields."""
    bare = re.sub(r"'[^']*'", "''", expression)
    # A name before a parenthesis is a function.
    found = re.findall(r"\b(?:self|oldSelf)\b(?:\.\w+\b(?!\())*", bare)
    return [path.split(".") for path in found]


@pytest.mark.parametrize(("new", "old"), GOOD, ids=range(len(GOOD)))
def test_valid_objects_pass(new: Object, old: Object | None) -> None:
    assert cel_problems(new, old) == []


@pytest.mark.parametrize(
    "bad",
    [bad for bad in BAD if bad.rejected_by is RejectedBy.CEL and bad.old is None],
    ids=lambda bad: bad.name,
)
def test_each_is_rejected_by_its_rule_alone(bad: Bad) -> None:
    [(rule, field)] = broken_by(bad)
    assert isinstance(rule.cel, CelRule)
    [(path, message)] = cel_problems(bad.manifest)
    assert message == rule.cel.message
    assert re.sub(r"\[\d+\]", "", path) == re.sub(r"\[\d+\]", "", field)
    # CEL names the list of arguments, the parser names the item.
    assert path in (bad.field, re.sub(r"\[\d+\]$", "", bad.field))


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.old], ids=lambda bad: bad.name)
def test_each_update_is_rejected_with_path_and_fix(bad: Bad) -> None:
    [(path, message)] = cel_problems(bad.manifest, bad.old)
    assert f"{path}: {message}" == bad.message


def test_every_rule_about_updates_has_a_bad_manifest() -> None:
    broken = {
        message for bad in BAD if bad.old for _, message in cel_problems(bad.manifest, bad.old)
    }
    assert broken == {cel.message for cel in UPDATE_CEL}


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.rejected_by is RejectedBy.OPERATOR], ids=lambda bad: bad.name
)
def test_manifests_that_only_the_operator_rejects_pass(bad: Bad) -> None:
    assert cel_problems(bad.manifest, bad.old) == []


def test_all_problems_are_reported_together() -> None:
    bad = cache(
        model={"source": "path:/models", "tokenSecret": {"name": "t"}},
        engines=[{"name": "a"}, {"name": "b", "args": ["--port=1"]}],
    )
    assert [path for path, _ in cel_problems(bad)] == [
        "spec.model.tokenSecret",
        "spec.model.source",
        "spec.engines[1].args",
    ]


@pytest.mark.parametrize(
    "argument",
    [
        *("--port", "--port=1", "--max-model-len=9", "--max_model_len", "--kv_transfer-config={}"),
        *(
            "--kv-transfer-config.kv_connector",
            "--kv-transfer-config.kv_role=x",
            "--kv-tr.kv_role=x",
        ),
        *("--kv-transfer-con={}", "--served-model", "--dt=half", "--por", "--ho=x", "--serv"),
        *("--api-key=x", "--api-k", "--config=/f", "--uds", "--root-path=/v1", "--grpc"),
        *("--ssl-keyfile", "--ssl-certf=/f", "--tokens-only", "--headless", "--ssl-"),
        *("--tensor-parallel-size=2", "--tens=2", "--data-parallel-rank=1", "--data=2", "--nn=2"),
        *("--hf-overrides.a=1", "--hf-o={}", "--quant=awq", "--enable-sleep", "--kv-cache-dt=fp8"),
        *("--no-enforce-eager", "--no-enforce", "--scheduling-policy=fcfs", "--rev=main"),
        *("--code-revision=v2", "--code-rev=v2", "--model-class-overrides={}"),
        *("--kv-offloading-size=4", "--kv-off=4", "--kv-offloading-backend=lmcache"),
        *("-tp=2", "-tp2", "-O3", "-q", "-", "--", "--=1", "8", "x--port", "--A", "--model-impl.x"),
        *("--model_impl=vllm", "--max+model+len", "--a--b", "--a\n", "--a=\n", ""),
    ],
)
def test_no_spelling_of_a_refused_argument_passes(argument: str) -> None:
    for field in ("args", "unsafeArgs"):
        bad = cache(engines=[{field: ["--seed=8", argument]}])
        assert {problem.field for problem in find_problems(bad)} == {f"spec.engines[0].{field}[1]"}
        path, pattern = f"spec.engines[0].{field}", SCHEMAS["RagCache"]
        for name in ("spec", "engines", "items", field, "items"):
            pattern = pattern.get("properties", pattern)[name]
        by_schema = not re2.search(pattern.get("pattern", ""), argument)
        # An abbreviation of several arguments may break several rules.
        assert by_schema or {path for path, _ in cel_problems(bad)} == {path}


@pytest.mark.parametrize(
    "argument",
    [
        *("--portal", "--hosts=1", "--modelx", "--max-model-length=9", "--dtypes", "--grpc-port=1"),
        *("--config-format=hf", "--kv-transfer-config-x", "--api-server-count=1", "--tokenizer=a"),
        *("--trust-remote-code", "--middleware=a.B", "--load-format=pt", "--lora-dtype=auto"),
        *("--speculative-config.model=x", "--allowed-local-media-path=/", "--model-impl=vllm"),
    ],
)
def test_other_arguments_pass_only_as_unsafe_ones(argument: str) -> None:
    unsafe = cache(engines=[{"unsafeArgs": [argument]}])
    assert cel_problems(unsafe) == []
    assert find_problems(unsafe) == []
    given = cache(engines=[{"args": [argument]}])
    assert [path for path, _ in cel_problems(given)] == ["spec.engines[0].args"]
    assert [problem.field for problem in find_problems(given)] == ["spec.engines[0].args[0]"]


@given(
    argument=st.one_of(
        st.text(max_size=64),
        st.builds(
            "{}{}{}".format,
            st.sampled_from(["--", "--no-", "-"]),
            st.sampled_from([*ALLOWED_FLAGS, "port", "trust-remote-code", "max_num_seqs"]),
            st.sampled_from(
                ["", "=1", "=0.1", "=8k", "=0", "=0.0", "=auto", "=pt", ".a=1", " 1", "=-1"]
            ),
        ),
    )
)
def test_the_server_and_the_parser_allow_the_same_arguments(argument: str) -> None:
    given_argument = cache(engines=[{"args": [argument]}])
    assert bool(cel_problems(given_argument)) == bool(find_problems(given_argument))


@pytest.mark.parametrize("bigger", ["99Gi", "10240Mi", 10737418241])
def test_storage_can_grow_in_any_notation(bigger: str | int) -> None:
    size = {"size": bigger}
    new = cache(retriever={"storage": size}, cacheStore={"disk": size})
    assert cel_problems(new, cache()) == []
    smaller = cache(retriever={"storage": {"size": 1}}, cacheStore={"disk": {"size": "9.5Gi"}})
    assert [path for path, _ in cel_problems(smaller, new)] == [
        "spec.retriever.storage.size",
        "spec.cacheStore.disk.size",
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


def test_update_rules_are_those_that_read_the_old_value() -> None:
    seen = {rule.cel.expression for rule in EVERY if isinstance(rule.cel, CelRule)}
    assert {expression for expression in seen if compares_with_old(expression)} == {
        cel.expression for cel in UPDATE_CEL
    }


@kinds
def test_defaults_keep_the_rules(kind: ResourceKind) -> None:
    """The API server rejects a definition whose defaults break its rules."""
    for path, schema in nodes(SCHEMAS[kind.name]):
        if "default" in schema:
            value = with_defaults(schema["default"], schema)
            assert list(_cel_problems(value, None, schema, path)) == []


def samples(schema: Schema) -> list[Any]:
    """Return values of a schema that rules may distinguish."""
    if "enum" in schema or schema["type"] == "boolean":
        return list(schema.get("enum", (False, True)))
    match schema["type"]:
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return [{}, *({"a": one} for one in samples(schema["additionalProperties"])[:1])]
        case "object":
            fields = schema.get("properties", {})
            required = {name: samples(fields[name])[0] for name in schema.get("required", ())}
            optional = [
                {name: value}
                for name, field in fields.items()
                if name not in required
                for value in _optional_samples(field)
            ]
            return [with_defaults(required | one, schema) for one in ({}, *optional)]
        case "array":
            return [[], *([item] for item in samples(schema["items"]))]
        case "integer":
            return [schema["minimum"], schema.get("maximum", 600)]
    fewest = schema.get("minLength", 0)
    return [
        text for text in TEXTS if len(text) >= fewest and re.search(schema.get("pattern", ""), text)
    ]


def _optional_samples(field: Schema) -> list[Any]:
    """Return values of a field of an object, among them each text that could be its default."""
    if "enum" in field:
        return list(field["enum"])
    if field.get("type") == "string":
        return samples(field) if "default" in field else []
    if field.get("type") == "array":
        return samples(field)[-1:] if "default" in field else []
    if field.get("type") == "object":
        found = samples(field)
        return [found[0], *found[1:][-1:]]
    return samples(field)[:1] if field.get("type") == "boolean" else []


@kinds
def test_rules_evaluate_with_any_field_left_out_and_as_the_operator_does(
    kind: ResourceKind,
) -> None:
    """A rule that reads a missing field fails, and the server's message would not help the user."""
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            if compares_with_old(rule["rule"]):
                continue
            choices = []
            for name in sorted({read[1] for read in paths_read(rule["rule"])}):
                field = schema["properties"][name]
                given = [{name: value} for value in samples(field)]
                choices.append(given if is_there(name, schema) else [{}, *given])
            values = [
                {name: item for one in chosen for name, item in one.items()}
                for chosen in itertools.product(*choices)
            ]
            answers = [holds(rule["rule"], value) for value in values]
            assert set(answers) == {True, False}, path
            if rule["rule"] in IN_PYTHON:
                evaluate = compile_cel(rule["rule"])
                assert [evaluate(value) for value in values] == answers, path


@kinds
def test_optional_fields_are_guarded_by_has(kind: ResourceKind) -> None:
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            guarded = re.findall(r"\bhas\(([.\w]+)\)", rule["rule"])
            for read in paths_read(rule["rule"]):
                at = schema
                for i, name in enumerate(read[1:], start=2):
                    assert is_there(name, at) or ".".join(read[:i]) in guarded, path
                    at = known(at, name)


@kinds
def test_rules_read_no_field_that_cel_escapes(kind: ResourceKind) -> None:
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
    """Return the schema of a field. Rules may always read metadata.name."""
    field = schema["properties"][name]
    assert isinstance(field, dict)
    if name == "metadata":
        return {"required": ["name"], "properties": {"name": {"type": "string"}}}
    return field


@kinds
def test_rules_name_fields_by_plain_paths(kind: ResourceKind) -> None:
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            assert rule.keys() <= RULE_KEYS, path
            assert re.fullmatch(r"(\.[a-zA-Z]\w*)+", rule.get("fieldPath", ".self")), path
            at = schema
            for name in rule.get("fieldPath", "").split(".")[1:]:
                at = at["properties"][name]


@kinds
def test_update_rules_are_outside_of_lists(kind: ResourceKind) -> None:
    """Items of a list have old values only by key, and no rule here needs one."""
    for path, schema, _ in ruled(SCHEMAS[kind.name]):
        if any(compares_with_old(rule["rule"]) for rule in schema["x-kubernetes-validations"]):
            assert "[]" not in path
            assert "{}" not in path


@kinds
def test_regular_expressions_are_valid_in_re2(kind: ResourceKind) -> None:
    for path, schema in nodes(SCHEMAS[kind.name]):
        if "pattern" in schema:
            assert re2.compile(schema["pattern"]), path
        for rule in schema.get("x-kubernetes-validations", ()):
            for pattern in re.findall(r"\.matches\('([^']*)'\)", rule["rule"]):
                assert "\\" not in pattern, path
                assert re2.compile(pattern), path


@kinds
def test_rule_costs_are_within_the_server_limits(kind: ResourceKind) -> None:
    total = 0
    for path, schema, times in ruled(SCHEMAS[kind.name]):
        for rule in schema["x-kubernetes-validations"]:
            cost = times * worst_cost(rule["rule"], schema)
            assert cost < RULE_BUDGET, f"{path}: {rule['rule']}"
            total += cost
    assert 0 < total < DEFINITION_BUDGET


def worst_cost(expression: str, schema: Schema) -> int:
    """Return an upper bound of the server's cost estimate.

    It counts 1 for each character of the expression, 0.1 for each byte of a string, and a quarter
    of that for each character of a regular expression. An expression over a list costs this for
    each item.
    """
    cost, items = len(expression), 1
    item: Schema = {}
    for read in paths_read(expression):
        at = schema
        for name in read[1:]:
            at = known(at, name)
        if at.get("type") == "array":
            items, item = at["maxItems"], at["items"]
        elif at.get("type") == "string" or "x-kubernetes-int-or-string" in at:
            cost += most_bytes(at) // 10 + 1
    for pattern in re.findall(r"\.matches\('([^']*)'\)", expression):
        cost += (most_bytes(item) // 10 + 1) * (len(pattern) // 4 + 1)
    return cost * items


def most_bytes(schema: Schema) -> int:
    if "enum" in schema:
        return max(len(value) for value in schema["enum"])
    return int(schema.get("maxLength", LONGEST_STRING)) * BYTES_PER_CHARACTER
