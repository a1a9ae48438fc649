"""Bad manifests: each is refused by path and fix, and nothing else is said about it."""

from __future__ import annotations

import pytest

from ragcache_operator.spec import RagCache, RagCollection
from ragcache_operator.spec.consistency import check_rules
from ragcache_operator.spec.manifest import InvalidManifest, parse
from ragcache_operator.spec.rules import CLUSTER_RULES, find_problems
from tests.helpers.operator_manifests import BAD, Bad, Layer


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_each_is_refused_by_path_and_fix(bad: Bad) -> None:
    [problem] = find_problems(bad.manifest, bad.old)
    assert str(problem) == bad.message
    assert problem.field == bad.field


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_the_parser_lets_through_only_what_is_wrong_in_a_cluster(bad: Bad) -> None:
    value: RagCache | RagCollection | None = None
    refused = ""
    try:
        value = parse(bad.manifest)
    except InvalidManifest as problem:
        refused = str(problem)
    if value is None:
        assert refused == bad.message
    else:
        assert bad.layer in (Layer.CEL, Layer.WEBHOOK)
        assert bad.old is not None or check_rules(CLUSTER_RULES, value)


def test_there_are_forty_or_more_and_no_two_alike() -> None:
    assert len(BAD) >= 40
    assert len({bad.name for bad in BAD}) == len(BAD)
    assert len({bad.message for bad in BAD}) >= 40
    assert {bad.layer for bad in BAD} == set(Layer)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.old], ids=lambda bad: bad.name)
def test_what_may_not_change_may_be_made(bad: Bad) -> None:
    assert find_problems(bad.manifest) == []
