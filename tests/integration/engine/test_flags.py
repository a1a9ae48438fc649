"""The arguments that the operator refuses for engines, compared with those of vLLM's server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ragcache_operator.spec.rules import FORBIDDEN_FLAGS, find_problems
from tests.helpers.operator_manifests import cache

pytestmark = pytest.mark.timeout(300)

# In a process of its own, because importing vLLM is slow, logs warnings and cannot be undone.
_PRINT_FLAGS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(json.dumps([*make_arg_parser(FlexibleArgumentParser())._option_string_actions]))
"""


@pytest.fixture(scope="module")
def flags() -> frozenset[str]:
    """Return all flags of vLLM's server, including the short ones."""
    argv = [sys.executable, "-c", _PRINT_FLAGS]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


FORBIDDEN = {flag for flags in FORBIDDEN_FLAGS for flag in flags.fixes}


def test_vllm_has_every_refused_flag(flags: frozenset[str]) -> None:
    assert FORBIDDEN - flags == set()


def test_no_other_flag_of_vllm_is_refused(flags: frozenset[str]) -> None:
    assert len(flags) > 100
    for flag in flags - FORBIDDEN:
        assert find_problems(cache(engines=[{"args": [flag]}])) == [], flag
