"""A bar of a long operation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ragcache_cli.output.console import counting_bar


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_on_a_terminal_alone(is_terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=80)
    with counting_bar(console, "measuring", "requests") as tell:
        tell(2, 7)
    assert ("2/7" in shown.getvalue()) == is_terminal
    assert is_terminal or shown.getvalue() == ""
