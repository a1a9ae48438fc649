"""The operator's lists of engine flags, compared with vLLM's parser and engine configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ragcache_operator.spec.engine_arguments import ALLOWED_FLAGS, REFUSED_FLAGS, SWITCH
from ragcache_operator.spec.rules import find_problems
from tests.kit.manifests import cache
from tests.kit.operator import build, container_of

pytestmark = pytest.mark.timeout(300)

TINYRAG = Path(__file__).parents[3] / "models" / "tinyrag" / "model"

REFUSED = {flag for flags in REFUSED_FLAGS for flag in flags.fixes}
SAMPLES = [
    *(
        f"--{flag}" if value is SWITCH else f"--{flag}={value.example}"
        for flag, value in ALLOWED_FLAGS.items()
    ),
    *(f"--no-{flag}" for flag, value in ALLOWED_FLAGS.items() if value is SWITCH),
]

NUMBERS = (
    *("0", "00", "1", "01", "999999999", "1000000000", "4294967296", "999999999999", "-1", "1e3"),
    *("0.0", "0.000000000", "0.000000001", "0.000000010", "0.999999999", "1.0", "1.1", "nan"),
)
"""Values at the limits of counts and shares."""
NUMERIC = [flag for flag, value in ALLOWED_FLAGS.items() if value.example[:1].isdecimal()]
OTHERS_FOR = {
    "--max-num-seqs=999999999": "--max-num-batched-tokens=999999999",
    "--long-prefill-token-threshold=999999999": "--max-model-len=999999999",
}
"""Flags that a large value needs besides its own."""

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

# Each set of arguments is built in turn. Copies keep vLLM from changing the parser's defaults.
_BUILD_CONFIGS = """
import copy, dataclasses, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import set_random_seed
base, given = json.loads(sys.argv[1])
parser = make_arg_parser(FlexibleArgumentParser())

def transfer_of(argument):
    values = copy.deepcopy(parser.parse_args([*base, *argument.split()]))
    config = AsyncEngineArgs.from_cli_args(values).create_engine_config()
    # The worker's first step, which numpy refuses for a seed of 2**32.
    set_random_seed(config.model_config.seed)
    transfer = dataclasses.asdict(config.kv_transfer_config)
    del transfer["engine_id"]
    return repr(transfer)

def attempt(argument):
    try:
        return transfer_of(argument)
    except (Exception, SystemExit) as error:
        print(argument, repr(error), file=sys.stderr)
        return None

def values_of(flag):
    action = parser._option_string_actions[flag]
    if action.nargs == 0:
        return [flag]
    values = list(action.choices or ["1", "0.5", "auto", "{}", '["a"]'])
    return [f"{flag}={value}" for value in values[:4]]

if given is None:
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    found = {flag: {a: attempt(a) for a in values_of(flag)} for flag in flags if flag != "--help"}
else:
    found = {argument: attempt(argument) for argument in given}
print(json.dumps({"plain": transfer_of(""), "found": found}))
"""


def build_configs(given: list[str] | None) -> Mapping[str, Any]:
    """Return the KV transfer configurations of engines, as text; None where vLLM refuses.

    Args:
        given: What is added to the operator's arguments, for one engine each. None adds each flag
            of vLLM with some sample values.
    """
    base = [*container_of(build(), "engine-main")["args"], f"--model={TINYRAG}"]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD_CONFIGS, json.dumps([base, given])],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    configs: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "'kv_connector': 'RagCacheConnector'" in configs["plain"]
    return configs


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


@pytest.mark.slow  # only another version of vLLM or another list changes its result
def test_no_unsafe_argument_changes_the_connector() -> None:
    configs = build_configs(None)
    built, changed = set(), set()
    for flag, samples in configs["found"].items():
        for sample, transfer in samples.items():
            if transfer is not None and passes(sample, "unsafeArgs"):
                built.add(flag)
            if transfer not in (None, configs["plain"]):
                changed.add(flag)
                assert not passes(sample, "unsafeArgs"), sample
    # The samples of the remaining flags need another model, device or flag.
    assert len(built) > 300
    assert "--kv-offloading-size" in changed


@pytest.mark.slow  # only another version of vLLM or another list changes its result
def test_an_engine_starts_with_every_number_that_args_takes() -> None:
    allowed = [
        argument
        for argument in (f"--{flag}={number}" for flag in NUMERIC for number in NUMBERS)
        if passes(argument, "args")
    ]
    assert {argument.partition("=")[0] for argument in allowed} == {f"--{f}" for f in NUMERIC}
    given = [f"{argument} {OTHERS_FOR.get(argument, '')}" for argument in allowed]
    refused = [
        argument for argument, transfer in build_configs(given)["found"].items() if not transfer
    ]
    assert refused == []
