"""Rules of objects in a cluster, and their CEL forms."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from ragcache_operator.spec.consistency import CONSISTENCY
from ragcache_operator.spec.manifest import InvalidManifest, parse_unchecked
from ragcache_operator.spec.rules import CLUSTER_RULES, UPDATE_RULES, find_problems
from ragcache_operator.spec.validation import (
    ENFORCED_BY_SCHEMA,
    NO_CEL_FOR_ITEMS,
    NO_CEL_FOR_METADATA,
    NO_CEL_FOR_NAMES,
    NO_CEL_FOR_QUANTITIES,
    Rule,
    walk_models,
)
from tests.kit.manifests import (
    BAD,
    Bad,
    Object,
    RejectedBy,
    cache,
    collection,
    external,
)

RULES = (*CONSISTENCY, *CLUSTER_RULES)
EVERY: list[Rule] = [*RULES, *UPDATE_RULES]
REJECTED_BY_WITHOUT_CEL = {
    ENFORCED_BY_SCHEMA: RejectedBy.SCHEMA,
    NO_CEL_FOR_ITEMS: RejectedBy.OPERATOR,
    NO_CEL_FOR_METADATA: RejectedBy.OPERATOR,
    NO_CEL_FOR_NAMES: RejectedBy.OPERATOR,
    NO_CEL_FOR_QUANTITIES: RejectedBy.OPERATOR,
}


def name_of(rule: Rule) -> str:
    return f"{rule.model.__name__}.{rule.field}"


def rejected_by(rule: Rule) -> RejectedBy:
    return REJECTED_BY_WITHOUT_CEL[rule.cel] if isinstance(rule.cel, str) else RejectedBy.CEL


def typed(manifest: Object) -> BaseModel | None:
    try:
        return parse_unchecked(manifest)
    except InvalidManifest:
        return None


def broken_by(bad: Bad) -> list[tuple[Rule, str]]:
    """Return the rules that a manifest breaks, each with its field path without list indexes."""
    value = typed(bad.manifest)
    if value is None:
        return []
    found: list[tuple[Rule, str]] = []
    for path, part in walk_models(value):
        found += [
            (rule, f"{path}.{rule.field}".strip("."))
            for rule in RULES
            if type(part) is rule.model and rule.check(part) is not None
        ]
    return found


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_rule_has_a_bad_manifest_in_its_layer(rule: Rule) -> None:
    breaking = [bad for bad in BAD if [r for r, _ in broken_by(bad)] == [rule]]
    assert breaking
    assert {bad.rejected_by for bad in breaking} == {rejected_by(rule)}


@pytest.mark.parametrize(
    "bad",
    [bad for bad in BAD if bad.rejected_by is RejectedBy.CEL and bad.old is None],
    ids=lambda bad: bad.name,
)
def test_cel_names_the_same_field_as_the_python_rule(bad: Bad) -> None:
    [(rule, field)] = broken_by(bad)
    assert not isinstance(rule.cel, str)
    assert field in (bad.field, re.sub(r"\[\d+\]$", "", bad.field))


@pytest.mark.parametrize("rule", EVERY, ids=name_of)
def test_cel_messages_have_problem_and_fix(rule: Rule) -> None:
    if isinstance(rule.cel, str):
        assert rule.cel in REJECTED_BY_WITHOUT_CEL
        return
    problem, _, fix = rule.cel.message.partition("; ")
    assert problem
    assert fix
    # The API server rejects messages with line breaks and empty expressions.
    assert "\n" not in rule.cel.message
    assert rule.cel.expression.strip()


def test_valid_objects_pass() -> None:
    assert find_problems(cache()) == []
    assert find_problems(collection()) == []
    assert find_problems(cache(model={"source": "pvc:models/llama"})) == []
    assert find_problems(cache(engines=[{"args": ["--max-num-seqs=8"]}])) == []
    assert find_problems(external(name="theirs", args=[], replicas=1)) == []


def test_all_problems_are_reported_together() -> None:
    spec: Object = {
        "model": {"source": "path:/models"},
        "engines": [{"name": "a", "args": ["--port=1"]}, {"name": "b", "unsafeArgs": ["--uds=x"]}],
    }
    assert [problem.field for problem in find_problems(cache(**spec))] == [
        "spec.model.source",
        "spec.engines[0].args[0]",
        "spec.engines[1].unsafeArgs[0]",
    ]


def test_an_object_being_deleted_passes() -> None:
    bad = cache(model={"source": "path:/models"})
    bad["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert find_problems(bad) == []
