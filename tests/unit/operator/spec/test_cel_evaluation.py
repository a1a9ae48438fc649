"""The operator's own evaluation of CEL, against cel-python and at its limits."""

from __future__ import annotations

from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from hypothesis import given
from hypothesis import strategies as st

from ragcache_operator.spec.cel import compile_cel

_FIELDS: dict[str, Any] = {"a": 2, "b": 3, "text": "http://e", "items": ["x"], "at": {"on": True}}
_VALUES = (
    *("has(self.a)", "has(self.c)", "has(self.at.on)", "has(self.at.off)", "self.at.on", "true"),
    *("self.a == 2", "self.a * 2 > self.b", "self.a >= self.b", "self.text.startsWith('http')"),
    *("self.text in ['none', 'http://e']", "size(self.items) > 0", "self.text != ''"),
    *("self.text.matches(r'^[a-z:/]+$')", "duration('1m30s') <= duration('90s')"),
    *("(self.text + '/').startsWith('ab' + '/')", "1 + 2 * 2 == 5"),
)
_EXPRESSIONS = st.recursive(
    st.sampled_from(_VALUES),
    lambda inner: st.one_of(
        inner.map("!({})".format),
        st.builds("({}) && ({})".format, inner, inner),
        st.builds("{} || {} && ({})".format, *[st.sampled_from(_VALUES)] * 2, inner),
        st.builds("({}) == ({})".format, inner, inner),
    ),
    max_leaves=8,
)


@given(_EXPRESSIONS)
def test_expressions_have_the_value_that_cel_gives_them(expression: str) -> None:
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    expected = bool(program.evaluate({"self": json_to_cel(_FIELDS)}))
    assert compile_cel(expression)(_FIELDS) is expected


def test_a_dollar_does_not_match_before_a_line_break() -> None:
    assert not compile_cel("self.text.matches('^a$')")({"text": "a\n"})


@pytest.mark.parametrize(
    "expression",
    ["", "self.a ==", "self.a ? 1 : 2", "self.a b", "(self.a", "1 - 1", "self.'a'", "sum(self.a)"],
)
def test_other_cel_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^['\"]"):
        compile_cel(expression)
