"""The operator's lists of engine flags, compared with the parser of vLLM's server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from ragcache_operator.spec.engine_arguments import ALLOWED_FLAGS, REFUSED_FLAGS, SWITCH
from ragcache_operator.spec.rules import find_problems
from tests.helpers.operator_manifests import cache

pytestmark = pytest.mark.timeout(300)

REFUSED = {flag for flags in REFUSED_FLAGS for flag in flags.fixes}
SAMPLES = [
    *(
        f"--{flag}" if value is SWITCH else f"--{flag}={value.example}"
        for flag, value in ALLOWED_FLAGS.items()
    ),
    *(f"--no-{flag}" for flag, value in ALLOWED_FLAGS.items() if value is SWITCH),
]

# In a process of its own, because importing vLLM is slow, logs warnings and cannot be undone.
_ASK_PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
flags = parser._option_string_actions
meant = {flag: flag for flag in flags}
for flag in flags:
    for length in range(2, len(flag)):
        prefix = flag[:length]
        found = {option for _, option, *_ in parser._get_option_tuples(prefix)}
        if prefix not in flags and len(found) == 1:
            meant[prefix] = found.pop()
chosen = {sample: [] for sample in json.loads(sys.argv[1])}
defaults = vars(parser.parse_args([]))
for sample in chosen:
    values = vars(parser.parse_args([sample]))
    chosen[sample] = [name for name in values if repr(values[name]) != repr(defaults[name])]
names = {flag: action.dest for flag, action in flags.items()}
print(json.dumps({"meant": meant, "names": names, "chosen": chosen}))
"""


@pytest.fixture(scope="module")
def parser() -> Mapping[str, Any]:
    """Return what vLLM's parser makes of all flags, of all abbreviations and of SAMPLES."""
    argv = [sys.executable, "-c", _ASK_PARSER, json.dumps(SAMPLES)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_refused(flag: str) -> bool:
    return any(
        flag == f"--{refused}" or (refused.endswith("-") and flag.startswith(f"--{refused}"))
        for refused in REFUSED
    )


def passes(argument: str, field: str) -> bool:
    return not find_problems(cache(engines=[{field: [argument]}]))


def test_vllm_has_every_refused_flag(parser: Mapping[str, Any]) -> None:
    for refused in REFUSED:
        assert any(
            flag == f"--{refused}" or (refused.endswith("-") and flag.startswith(f"--{refused}"))
            for flag in parser["names"]
        ), refused


def test_vllm_takes_every_allowed_argument_for_its_own_flag(parser: Mapping[str, Any]) -> None:
    for sample in SAMPLES:
        assert passes(sample, "args"), sample
        own = parser["names"][sample.partition("=")[0]]
        assert set(parser["chosen"][sample]) <= {own}, sample


def test_an_allowed_value_is_not_vllms_default_everywhere(parser: Mapping[str, Any]) -> None:
    """So the samples do reach their fields."""
    assert sum(bool(fields) for fields in parser["chosen"].values()) > len(ALLOWED_FLAGS) // 2


def test_every_flag_of_vllm_is_allowed_unsafe_or_refused(parser: Mapping[str, Any]) -> None:
    flags = [flag for flag in parser["names"] if flag.startswith("--")]
    assert len(flags) > 200
    for flag in flags:
        assert passes(flag, "unsafeArgs") is not is_refused(flag), flag
        assert passes(flag, "args") is (flag in SAMPLES), flag


def test_no_abbreviation_gets_around_a_list(parser: Mapping[str, Any]) -> None:
    assert len(parser["meant"]) > 1000
    for written, flag in parser["meant"].items():
        for argument in (written, f"{written}=1", f"{written}.a=1", written.replace("-", "_")):
            assert not passes(argument, "unsafeArgs") or not is_refused(flag), argument
            assert not passes(argument, "args") or written == flag, argument


def test_short_forms_pass_nowhere(parser: Mapping[str, Any]) -> None:
    short = [flag for flag in parser["names"] if not flag.startswith("--")]
    assert "-tp" in short
    for flag in short:
        for argument in (flag, f"{flag}=2", f"{flag}2"):
            assert not passes(argument, "args"), argument
            assert not passes(argument, "unsafeArgs"), argument
