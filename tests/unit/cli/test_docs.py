"""The examples of docs/cli.md, parsed as the command parses them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.kit.documentation import cli_commands, parse

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
EXAMPLES = [
    example
    for example in re.findall(r"^(?:\| `|    )(ragcache [^`\n]+)", PAGE, re.MULTILINE)
    if "COMMAND" not in example
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_parses(example: str) -> None:
    program, *words = shlex.split(example)
    assert program == "ragcache"
    assert parse(words) in cli_commands()


def test_every_command_has_an_example() -> None:
    assert {parse(shlex.split(example)[1:]) for example in EXAMPLES} == set(cli_commands())


def test_a_wrong_example_does_not_parse() -> None:
    for wrong in (["top", "--twice"], ["collection", "get"], ["completion", "tcsh"]):
        with pytest.raises(Exception, match=r"(?i)no such option|missing parameter|is not one of"):
            parse(wrong)


NO_DATA = {
    *(("up",), ("down",), ("logs",), ("sync",), ("completion",)),
    *(("keys", "new"), ("keys", "hash")),
}
"""Commands that run or stop processes, or whose only form is lines of JSON or a text to keep."""


def test_every_command_that_prints_data_prints_json() -> None:
    without = {
        words
        for words, command in cli_commands().items()
        if not any("--output" in parameter.opts for parameter in command.params)
    }
    assert without == NO_DATA
