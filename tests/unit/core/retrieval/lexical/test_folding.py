"""Characters that readers take for the same ones are the same ones to searches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.retrieval.lexical.folding import comparable, folded


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\uff21\uff22\uff11\uff12\uff1a\ufb01", "ab12:fi"),
        ("Über-Größe, l'été", "uber-grosse, l'ete"),
        ("co\u00adoperate zero\u200bwidth \ufeffmark", "cooperate zerowidth mark"),
        ("2024\u201303\u201105", "2024-03-05"),
        ("מִשְׁפָּט", "משפט"),
        ("ガラス ｶﾞﾗｽ", "ガラス ガラス"),
        ("ที่นี่ हिन्दी 한국", "ที่นี่ हिन्दी 한국"),
    ],
    ids=["width", "accents", "invisible", "hyphens", "vowel points", "kana", "marks of letters"],
)
def test_forms_of_characters_are_folded(text: str, expected: str) -> None:
    assert folded(text) == expected


@given(st.text(max_size=50))
def test_folding_again_changes_nothing(text: str) -> None:
    once = folded(text)
    assert folded(once) == once


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_loses_its_case_only(text: str) -> None:
    assert folded(text) == text.lower()


def test_white_space_and_invisible_characters_make_no_other_text() -> None:
    assert comparable("The\u00a0rent\n is\u200b  due.") == comparable(" The rent is due.\t")


@pytest.mark.parametrize(
    "other", ["Rent of hall F", "Rent of hall a", "Rent of hall A²", "Rent: hall A"]
)
def test_another_name_or_number_makes_another_text(other: str) -> None:
    assert comparable(other) != comparable("Rent of hall A")
