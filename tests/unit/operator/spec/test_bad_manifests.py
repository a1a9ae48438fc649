"""Bad manifests: each is rejected with exactly one problem, which has path and fix."""

from __future__ import annotations

import pytest

from ragcache_operator.spec.collection import RagCollection
from ragcache_operator.spec.manifest import InvalidManifest, parse
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.spec.rules import CLUSTER_RULES, find_problems
from ragcache_operator.spec.validation import check_rules
from tests.kit.manifests import BAD, Bad, RejectedBy


@pytest.mark.parametrize("bad", [bad for bad in BAD if not bad.old], ids=lambda bad: bad.name)
def test_each_is_rejected_with_path_and_fix(bad: Bad) -> None:
    [problem] = find_problems(bad.manifest)
    assert str(problem) == bad.message
    assert problem.field == bad.field


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_the_parser_accepts_only_what_is_invalid_in_a_cluster(bad: Bad) -> None:
    value: RagCache | RagCollection | None = None
    refused = ""
    try:
        value = parse(bad.manifest)
    except InvalidManifest as problem:
        refused = str(problem)
    if value is None:
        assert refused == bad.message
    else:
        assert bad.rejected_by in (RejectedBy.CEL, RejectedBy.OPERATOR)
        assert bad.old is not None or check_rules(CLUSTER_RULES, value)


def test_there_are_at_least_forty_and_no_two_are_alike() -> None:
    assert len(BAD) >= 40
    assert len({bad.name for bad in BAD}) == len(BAD)
    assert len({bad.message for bad in BAD}) >= 40
    assert {bad.rejected_by for bad in BAD} == set(RejectedBy)


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.old], ids=lambda bad: bad.name)
def test_immutable_fields_may_be_set_on_creation(bad: Bad) -> None:
    assert find_problems(bad.manifest) == []
