"""Rules: what clusters refuse, what updates may not change, and that CEL says the same."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from ragcache_operator.spec.consistency import (
    CONSISTENCY,
    ENFORCED_BY_SCHEMA,
    NO_CEL_FOR_QUANTITIES,
    Rule,
    walk_models,
)
from ragcache_operator.spec.manifest import InvalidManifest, read
from ragcache_operator.spec.rules import CLUSTER_RULES, UPDATE_RULES, UpdateRule, find_problems
from tests.helpers.operator_manifests import BAD, Bad, Layer, Object, cache, collection

RULES = (*CONSISTENCY, *CLUSTER_RULES)
EVERY: list[Rule | UpdateRule] = [*RULES, *UPDATE_RULES]
LAYER_WITHOUT_CEL = {ENFORCED_BY_SCHEMA: Layer.SCHEMA, NO_CEL_FOR_QUANTITIES: Layer.WEBHOOK}


def layer_of(rule: Rule | UpdateRule) -> Layer:
    return LAYER_WITHOUT_CEL[rule.cel] if isinstance(rule.cel, str) else Layer.CEL


def typed(manifest: Object) -> BaseModel | None:
    try:
        return read(manifest)
    except InvalidManifest:
        return None


def broken_by(bad: Bad) -> list[tuple[Rule | UpdateRule, str]]:
    """Rules that a manifest breaks, each with the field it blames, lists' positions left out."""
    value = typed(bad.manifest)
    if value is None:
        return []
    found: list[tuple[Rule | UpdateRule, str]] = []
    for path, part in walk_models(value):
        found += [
            (rule, f"{path}.{rule.field}".strip("."))
            for rule in RULES
            if type(part) is rule.model and rule.check(part) is not None
        ]
    before = dict(walk_models(read(bad.old))) if bad.old else {}
    for path, part in walk_models(value):
        found += [
            (rule, f"{path}.{rule.field}".strip("."))
            for rule in UPDATE_RULES
            if path in before and type(part) is rule.model and rule.check(part, before[path])
        ]
    return found


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_every_rule_has_a_bad_manifest_in_its_layer(rule: Rule | UpdateRule) -> None:
    breaking = [bad for bad in BAD if [r for r, _ in broken_by(bad)] == [rule]]
    assert breaking
    assert {bad.layer for bad in breaking} == {layer_of(rule)}


@pytest.mark.parametrize(
    "bad", [bad for bad in BAD if bad.layer is Layer.CEL], ids=lambda bad: bad.name
)
def test_cel_blames_the_field_that_its_twin_blames(bad: Bad) -> None:
    [(rule, field)] = broken_by(bad)
    assert not isinstance(rule.cel, str)
    assert bad.field in (field, f"{field}[0]")


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_cel_says_problem_and_fix(rule: Rule | UpdateRule) -> None:
    if isinstance(rule.cel, str):
        assert rule.cel in LAYER_WITHOUT_CEL
        return
    problem, _, fix = rule.cel.message.partition("; ")
    assert problem
    assert fix
    # Messages have no line breaks, expressions are not empty: the API server insists.
    assert "\n" not in rule.cel.message
    assert rule.cel.expression.strip()


def test_rules_have_names_of_their_own() -> None:
    names = [rule.name for rule in EVERY]
    assert len(set(names)) == len(names)


def test_good_objects_are_let_through() -> None:
    assert find_problems(cache()) == []
    assert find_problems(collection()) == []
    assert find_problems(cache(model={"source": "pvc:models/llama"})) == []
    assert find_problems(cache(engines=[{"args": ["--max-num-seqs", "8"]}])) == []


def test_every_problem_comes_at_once() -> None:
    spec: Object = {
        "model": {"source": "path:/models"},
        "engines": [{"name": "a", "args": ["--port", "1"]}, {"name": "b", "args": ["--host=x"]}],
    }
    assert [problem.field for problem in find_problems(cache(**spec))] == [
        "spec.model.source",
        "spec.engines[0].args[0]",
        "spec.engines[1].args[0]",
    ]


def test_what_is_equal_in_other_words_is_no_change_of_collection() -> None:
    named = collection(collection="handbook")
    assert find_problems(named, collection()) == []
    assert find_problems(collection(), named) == []


def test_everything_else_may_change() -> None:
    assert find_problems(cache(model={"name": "m"}, cacheStore={"shards": 2}), cache()) == []
    assert find_problems(collection(prune=False), collection()) == []


def test_every_volume_that_is_claimed_for_ever_stays() -> None:
    bigger = {"size": "99Gi"}
    new = cache(retriever={"storage": bigger}, cacheStore={"disk": bigger})
    assert [problem.field for problem in find_problems(new, cache())] == [
        "spec.retriever.storage",
        "spec.cacheStore.disk",
    ]


def test_an_object_on_its_way_out_is_let_go() -> None:
    bad = cache(model={"source": "path:/models"})
    bad["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert find_problems(bad) == []


def test_what_an_update_leaves_alone_is_not_held_against_it() -> None:
    bad = cache(gateway={"port": 0})
    labelled = {**bad, "metadata": {"name": "docs", "labels": {"team": "a"}}}
    assert find_problems(labelled, bad) == []
    assert find_problems(bad)


def test_an_old_object_that_nothing_was_made_of_binds_nobody() -> None:
    bad = cache(retriever={"storage": {"size": "much"}})
    assert find_problems(cache(retriever={"storage": {"size": "1Gi"}}), bad) == []
