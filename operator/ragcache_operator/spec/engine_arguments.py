"""The arguments of vLLM's server that users may set: an allow-list for ``args``, and a deny-list.

``engines[].args`` takes the flags of ``ALLOWED_FLAGS``, each with a value of its kind. They neither
load code nor read files, and the engine starts with them. ``engines[].unsafeArgs`` takes every
other flag except those of ``REFUSED_FLAGS``.

Each item is one flag: ``--flag`` or ``--flag=value``. So an item means the same wherever it is in
the list, and the API server can check it alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ragcache_operator.spec.ragcache import EngineSpec
from ragcache_operator.spec.validation import CelRule, Rule, Violation

_LEAVE_OUT: Final = "leave it out"


@dataclass(frozen=True, slots=True)
class FlagValue:
    """The kind of value that a flag takes.

    Args:
        words: The kind in words, after "takes".
        pattern: A regular expression, without backslashes, that Python and RE2 accept.
        example: A valid value.
    """

    words: str
    pattern: str
    example: str


SWITCH: Final = FlagValue("no value", "", "")
"""A flag without a value, which ``--no-`` turns off."""
_COUNT: Final = FlagValue("a whole number from 1 to 999999999", "[1-9][0-9]{0,8}", "8")
_COUNT_OR_ZERO: Final = FlagValue("a whole number from 0 to 999999999", "(0|[1-9][0-9]{0,8})", "8")
"""For a seed, the bound is below the 2**32 of numpy."""
_SHARE: Final = FlagValue("a number above 0, up to 1", "(0[.][0-9]{0,8}[1-9]0{0,8}|1)", "0.1")


def _parser(example: str) -> FlagValue:
    words = "a parser's name, of letters, digits, - and _"
    return FlagValue(words, "[A-Za-z0-9][A-Za-z0-9_-]{0,62}", example)


def _one_of(*words: str) -> FlagValue:
    return FlagValue(f"one of {', '.join(words)}", f"({'|'.join(words)})", words[0])


ALLOWED_FLAGS: Final[Mapping[str, FlagValue]] = {
    # Batches and their order.
    "max-num-seqs": _COUNT,
    "max-num-batched-tokens": _COUNT,
    "long-prefill-token-threshold": _COUNT_OR_ZERO,
    "enable-chunked-prefill": SWITCH,
    "async-scheduling": SWITCH,
    "stream-interval": _COUNT,
    # The paged KV cache.
    "block-size": _COUNT,
    "enable-prefix-caching": SWITCH,
    "prefix-caching-hash-algo": _one_of("sha256", "sha256_cbor"),
    # Attention and sampling.
    "attention-backend": _one_of("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"),
    "max-cudagraph-capture-size": _COUNT_OR_ZERO,
    "disable-sliding-window": SWITCH,
    "disable-cascade-attn": SWITCH,
    "seed": _COUNT_OR_ZERO,
    "max-logprobs": _COUNT_OR_ZERO,
    "logprobs-mode": _one_of(
        "raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"
    ),
    "generation-config": _one_of("auto", "vllm"),
    # Tool calls and reasoning. The parsers come with vLLM; a plugin would be a file.
    "enable-auto-tool-choice": SWITCH,
    "exclude-tools-when-tool-choice-none": SWITCH,
    "tool-call-parser": _parser("hermes"),
    "reasoning-parser": _parser("qwen3"),
    # Reading of weights. Other formats can hold pickled code.
    "load-format": _one_of("auto", "safetensors"),
    "safetensors-load-strategy": _one_of("lazy", "eager", "prefetch"),
    "use-tqdm-on-load": SWITCH,
    # Logs and metrics.
    "uvicorn-log-level": _one_of("critical", "error", "warning", "info", "debug", "trace"),
    "disable-uvicorn-access-log": SWITCH,
    "disable-fastapi-docs": SWITCH,
    "log-error-stack": SWITCH,
    "max-log-len": _COUNT_OR_ZERO,
    "kv-cache-metrics": SWITCH,
    "kv-cache-metrics-sample": _SHARE,
    "enable-mfu-metrics": SWITCH,
}
"""Flags that ``args`` takes, without their dashes."""


@dataclass(frozen=True, slots=True)
class RefusedFlags:
    """Flags that an engine cannot have, also not in ``unsafeArgs``.

    Args:
        problem: What each of the flags would break.
        fixes: What to do instead, by flag without its dashes. A flag that ends with ``-`` stands
            for all flags that begin with it.
    """

    problem: str
    fixes: Mapping[str, str]

    @property
    def rule(self) -> Rule:
        """The rule that an engine's unsafeArgs contain none of the flags."""
        return Rule(
            EngineSpec,
            "unsafeArgs",
            self._check,
            CelRule(
                "!has(self.unsafeArgs) || "
                f"!self.unsafeArgs.exists(argument, argument.matches('{self._any}'))",
                f"contain an argument that {self.problem}; remove "
                + ", ".join(f"--{flag}" + "*" * flag.endswith("-") for flag in self.fixes),
            ),
        )

    def violation(self, argument: str) -> Violation | None:
        """Return why an argument is refused; None if it is not one of the flags."""
        given = flag_of(argument)
        for flag, fix in self.fixes.items():
            if given == flag or (flag.endswith("-") and given.startswith(flag)):
                return Violation(f"--{given} {self.problem}", fix)
            if given and flag.startswith(given):
                return Violation(f"--{given}, short for --{flag}, {self.problem}", fix)
        return None

    def _check(self, engine: EngineSpec) -> Violation | None:
        for i, argument in enumerate(engine.unsafe_args):
            found = self.violation(argument)
            if found is not None:
                return Violation(found.problem, found.fix, f"[{i}]")
        return None

    @property
    def _any(self) -> str:
        """An RE2 pattern, without backslashes, of every spelling of the flags."""
        return f"^--({'|'.join(map(_abbreviations, self.fixes))})([=.]|$)"


def flag_of(argument: str) -> str:
    """Return the flag of an argument as vLLM parses it: without dashes, value and key.

    ``--max_model_len=9`` is ``--max-model-len 9``. ``--kv-transfer-config.kv_role=x`` sets one key
    of the value of ``--kv-transfer-config``.
    """
    return re.split("[=.]", argument, maxsplit=1)[0].removeprefix("--").replace("_", "-")


def _abbreviations(flag: str) -> str:
    """Return a pattern of every prefix of a flag, because argparse accepts unique prefixes.

    argparse rejects a prefix of several flags. So the pattern rejects no working argument, as long
    as no flag of vLLM is itself a prefix of a refused flag.
    """
    rest = "[a-z-]*" if flag.endswith("-") else ""
    return "(".join(flag) + rest + ")?" * (len(flag) - 1)


REFUSED_FLAGS: Final = (
    RefusedFlags(
        "is set by a field of the RagCache",
        {
            "model": "set spec.model.source",
            "served-model-name": "set spec.model.name",
            "max-model-len": "set spec.model.maxLength",
            "dtype": "set spec.model.dtype",
            "hf-token": "set spec.model.tokenSecret",
            "kv-cache-memory-bytes": "set spec.engines[].kvMemory",
            "gpu-memory-utilization": "set spec.engines[].gpu.memoryShare",
            "otlp-traces-endpoint": "set spec.telemetry.otlp",
        },
    ),
    RefusedFlags(
        "changes the address or protocol of the engine's server",
        dict.fromkeys(("host", "port", "uds", "root-path", "grpc", "headless"), _LEAVE_OUT),
    ),
    RefusedFlags(
        "makes the engine reject the gateway's requests",
        dict.fromkeys(("api-key", "ssl-keyfile", "ssl-certfile", "tokens-only"), _LEAVE_OUT),
    ),
    RefusedFlags(
        "replaces an argument that RagCache sets",
        dict.fromkeys(
            (
                *("kv-transfer-config", "config", "scheduling-policy"),
                *("enforce-eager", "no-enforce-eager"),
                *("enable-prompt-tokens-details", "no-enable-prompt-tokens-details"),
            ),
            _LEAVE_OUT,
        ),
    ),
    RefusedFlags(
        "replaces RagCache's connector with vLLM's own offloading of KV",
        {"kv-offloading-": "leave it out, and set spec.engines[].hostTier"},
    ),
    RefusedFlags(
        "asks for ranks in a way that stored KV does not support",
        {
            "tensor-parallel-size": "leave it out, and set spec.engines[].tensorParallel",
            **dict.fromkeys(
                (
                    *("pipeline-parallel-size", "data-parallel-"),
                    *("prefill-context-parallel-size", "decode-context-parallel-size"),
                    *("nnodes", "node-rank"),
                ),
                "leave it out, and set spec.engines[].tensorParallel or replicas",
            ),
        },
    ),
    RefusedFlags(
        "changes the model, while stored KV is named by the model's folder",
        dict.fromkeys(
            (
                *("quantization", "quantization-config", "hf-overrides", "hf-config-path"),
                *("revision", "code-revision", "model-class-overrides"),
            ),
            "make a model folder with these settings, and name it with pvc: or path:",
        ),
    ),
    RefusedFlags(
        "changes or discards KV, which the engine refuses at start",
        dict.fromkeys(("kv-cache-dtype", "enable-sleep-mode"), _LEAVE_OUT),
    ),
)
"""Flags that the operator sets, that the engine refuses, or that disconnect it from the platform.

The API server limits the cost of one rule's pattern, so the flags form several small groups.
``--ssl-ca-certs`` and similar flags have no effect without a certificate.
"""


def _allowed_pattern() -> str:
    """Return an RE2 pattern, without backslashes, of all arguments that ``args`` takes."""
    by_value: dict[str, list[str]] = {}
    for flag, value in ALLOWED_FLAGS.items():
        by_value.setdefault(value.pattern, []).append(flag)
    switches = by_value.pop(SWITCH.pattern)
    groups = [f"(no-)?({'|'.join(switches)})"]
    groups += [f"({'|'.join(flags)})={pattern}" for pattern, flags in by_value.items()]
    return f"^--({'|'.join(groups)})$"


def _only_allowed(engine: EngineSpec) -> Violation | None:
    for i, argument in enumerate(engine.args):
        found = _violation(argument)
        if found is not None:
            return Violation(found.problem, found.fix, f"[{i}]")
    return None


def _violation(argument: str) -> Violation | None:
    if re.fullmatch(_allowed_pattern(), argument, re.ASCII):
        return None
    if not argument.startswith("--"):
        return Violation(
            f"{argument!r} does not begin with two dashes",
            "write each flag with its value as one item, like --max-num-seqs=8",
        )
    for group in REFUSED_FLAGS:
        refused = group.violation(argument)
        if refused is not None:
            return refused
    flag = flag_of(argument)
    value = ALLOWED_FLAGS.get(flag.removeprefix("no-"))
    if value is None or "." in argument.partition("=")[0]:
        near = difflib.get_close_matches(flag, ALLOWED_FLAGS, 1, 0.8)
        similar = f"write --{near[0]}, or " if near else ""
        return Violation(
            f"--{flag} is not among the flags that args takes",
            f"{similar}leave it out, or move it to unsafeArgs if you trust what it loads",
        )
    if value is SWITCH:
        return Violation(f"{argument} is misspelled, or has a value", f"write --{flag}")
    return Violation(
        f"{argument} is misspelled, or has no valid value: it takes {value.words}",
        f"write it as one item, like --{flag.removeprefix('no-')}={value.example}",
    )


ENGINE_ARGUMENT_RULES: Final = (
    Rule(
        EngineSpec,
        "args",
        _only_allowed,
        CelRule(
            f"!has(self.args) || self.args.all(argument, argument.matches('{_allowed_pattern()}'))",
            "contain an argument that is not --flag or --flag=value with an allowed flag; correct "
            "it, or move it to unsafeArgs if you trust what it loads. Allowed are "
            f"{', '.join(f'--{flag}' for flag in ALLOWED_FLAGS)}.",
        ),
    ),
    *(flags.rule for flags in REFUSED_FLAGS),
)
