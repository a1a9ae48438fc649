"""The title of a heading is what a reader sees of it."""

from __future__ import annotations

import pytest

from ragcache_core.documents.markdown_titles import MAX_TITLE_CHARS, title_of


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("Install {#install}", "Install"),
        ("Install {: #install .wide}", "Install"),
        ("Install {/* #install */}", "Install"),
        ("Use {name} here", "Use {name} here"),
        ('Install [¶](#install "Permanent link")', "Install"),
        ("[](#install)Install", "Install"),
        ("Install ¶", "Install"),
        ('<a name="install"></a>Install', "Install"),
        ('Install <a href="#install" class="anchor">#</a>', "Install"),
        ("See [API](#api)", "See API"),
        ("[Unreleased] and [1.0](CHANGES.md)", "[Unreleased] and 1.0"),
        ("![logo](logo.png) Guide", "Guide"),
        ("![Guide](logo.png)", "Guide"),
        ('<img src="logo.png" alt="Guide">', "Guide"),
        ("<b>Big</b><br> news", "Big news"),
        ("List<String> and C#", "List<String> and C#"),
        ("The `<a>` tag", "The `<a>` tag"),
        ("Q &amp; A \\# 1", "Q & A # 1"),
        ("a\n  b", "a b"),
    ],
)
def test_markup_around_a_title_is_left_out(heading: str, title: str) -> None:
    assert title_of(heading) == title


@pytest.mark.parametrize("heading", ["", " ", "<br>", "[#](#x)", "a" * (MAX_TITLE_CHARS + 1)])
def test_no_title_and_a_long_one_are_none(heading: str) -> None:
    assert title_of(heading) is None
