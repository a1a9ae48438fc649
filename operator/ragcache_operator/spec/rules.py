"""Validation of RagCache and RagCollection objects in a cluster, without side effects.

The webhook validates an object before the API server stores it. The operator validates it again
before each pass, because a webhook is optional. The CLI validates it before it sends anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec import (
    CacheRef,
    CacheStoreSpec,
    EngineSpec,
    ModelSpec,
    RagCollection,
    ResourcesSpec,
    StorageSpec,
)
from ragcache_operator.spec.manifest import InvalidManifest, parse, parse_unchecked
from ragcache_operator.spec.validation import (
    NO_CEL_FOR_QUANTITIES,
    CelRule,
    Rule,
    Violation,
    check_rules,
    join_path,
    walk_models,
)


@dataclass(frozen=True, slots=True)
class ForbiddenFlags:
    """Arguments of vLLM's server that ``spec.engines[].args`` must not contain.

    Args:
        name: The rule in words.
        problem: What each of the arguments would break.
        fixes: What to do instead, by argument.
    """

    name: str
    problem: str
    fixes: Mapping[str, str]

    @property
    def rule(self) -> Rule:
        """The rule that an engine's args contain none of the flags."""
        return Rule(
            self.name,
            EngineSpec,
            "args",
            self._check,
            CelRule(
                f"!has(self.args) || !self.args.exists(argument, argument.matches('{self._any}'))",
                f"contain an argument that {self.problem}; remove {', '.join(self.fixes)}",
            ),
        )

    def _check(self, engine: EngineSpec) -> Violation | None:
        for i, argument in enumerate(engine.args):
            flag = _flag_of(argument)
            for forbidden, fix in self.fixes.items():
                if flag == forbidden:
                    return Violation(f"{flag} {self.problem}", fix, f"[{i}]")
                if len(flag) > len("--") and forbidden.startswith(flag):
                    problem = f"{flag}, short for {forbidden}, {self.problem}"
                    return Violation(problem, fix, f"[{i}]")
        return None

    @property
    def _any(self) -> str:
        """An RE2 pattern, without backslashes, of every spelling of the flags."""
        return f"^--({'|'.join(_abbreviations(flag[2:]) for flag in self.fixes)})([=.]|$)"


def _flag_of(argument: str) -> str:
    """Return the flag of an argument as vLLM parses it: with dashes, without value and subkey.

    ``--max_model_len=9`` is ``--max-model-len 9``. ``--kv-transfer-config.kv_role=x`` sets one key
    of the value of ``--kv-transfer-config``.
    """
    return re.split("[=.]", argument, maxsplit=1)[0].replace("_", "-")


def _abbreviations(word: str) -> str:
    """Return a pattern of every prefix of a word, because argparse accepts unique prefixes.

    argparse rejects a prefix of several flags. So the pattern rejects no working argument, as long
    as no flag of vLLM is itself a prefix of a forbidden flag.
    """
    letters = ["[-_]" if letter == "-" else letter for letter in word]
    return "(".join(letters) + ")?" * (len(letters) - 1)


_LEAVE_OUT: Final = "leave it out"
# API servers limit the cost of one rule's pattern, so the flags form several small groups.
FORBIDDEN_FLAGS: Final = (
    ForbiddenFlags(
        "no arguments that fields set",
        "is set by a field of the RagCache",
        {
            "--model": "set spec.model.source",
            "--served-model-name": "set spec.model.name",
            "--max-model-len": "set spec.model.maxLength",
            "--dtype": "set spec.model.dtype",
        },
    ),
    ForbiddenFlags(
        "no arguments that change the engine's address",
        "changes the address or protocol of the engine's server",
        dict.fromkeys(
            ("--host", "--port", "--uds", "--root-path", "--grpc", "--headless"), _LEAVE_OUT
        ),
    ),
    ForbiddenFlags(
        "no arguments that reject the gateway's requests",
        "makes the engine reject the gateway's requests",
        dict.fromkeys(
            ("--api-key", "--ssl-keyfile", "--ssl-certfile", "--tokens-only"), _LEAVE_OUT
        ),
    ),
    ForbiddenFlags(
        "no arguments that replace the connector",
        "replaces a setting of RagCache",
        dict.fromkeys(("--kv-transfer-config", "--config"), _LEAVE_OUT),
    ),
)
"""Arguments that a field sets, and arguments that would disconnect an engine from the platform.

Other arguments are allowed. ``--ssl-ca-certs`` and similar flags have no effect without a
certificate. ``--data-parallel-size`` and similar flags do not move the server. ``--load-format``
and ``--tokenizer`` change the answers, but the engine still answers.
"""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """A rule about what an update may change in the values of one model.

    Args:
        name: The rule in words. Tests use it as an id.
        model: The model that the rule is about.
        field: Path of the invalid field below the value, as in a manifest. Empty for the value
            itself.
        check: Takes the new and the old value. Returns a Violation, or None for an allowed change.
        cel: The CEL form.
    """

    name: str
    model: type[BaseModel]
    field: str
    check: Callable[[Any, Any], Violation | None]
    cel: CelRule


def find_problems(
    new: Mapping[str, Any], old: Mapping[str, Any] | None = None
) -> list[InvalidInput]:
    """Return every problem of an object of either kind in a cluster.

    An object passes if an update leaves its spec unchanged or if it is being deleted. Otherwise a
    stricter release would block the removal of finalizers from older objects.

    Args:
        old: The object that an update replaces.
    """
    if old is not None and new.get("spec") == old.get("spec"):
        return []
    meta = new.get("metadata")
    if isinstance(meta, Mapping) and "deletionTimestamp" in meta:
        return []
    try:
        value = parse(new)
    except InvalidManifest as error:
        return list(error.problems)
    problems = check_rules(CLUSTER_RULES, value)
    if old is not None:
        problems += _forbidden_changes(value, old)
    return problems


def _forbidden_changes(new: BaseModel, old: Mapping[str, Any]) -> list[InvalidInput]:
    try:
        before = dict(walk_models(parse_unchecked(old)))
    except InvalidManifest:
        # The operator never applied the old object, so every change is allowed.
        return []
    problems = []
    for path, value in walk_models(new):
        for rule in UPDATE_RULES:
            if type(value) is not rule.model or type(before.get(path)) is not rule.model:
                continue
            violation = rule.check(value, before[path])
            if violation is not None:
                field = join_path(path, rule.field)
                problems.append(InvalidInput(field, violation.problem, violation.fix))
    return problems


def _model_is_reachable(model: ModelSpec) -> Violation | None:
    if model.parsed_source.kind != "path":
        return None
    return Violation(
        f"{model.source} is a local folder, which pods cannot read",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    )


def _memory_exceeds(
    resources: ResourcesSpec, amount: str, num_bytes: int, fields: str
) -> Violation | None:
    """Check that request and limit are above the memory that the component fills by design."""
    for field, text, given in (
        ("memory", resources.memory, resources.memory_bytes),
        ("memoryLimit", resources.memory_limit, resources.memory_limit_bytes),
    ):
        if given is not None and given <= num_bytes:
            return Violation(
                f"{text} is not above the {amount} of {fields}",
                f"use well over {amount}, or leave it out to derive it",
                f".{field}",
            )
    return None


def _store_fits(store: CacheStoreSpec) -> Violation | None:
    return _memory_exceeds(store.resources, store.memory, store.memory_bytes, "memory")


def _engine_fits(engine: EngineSpec) -> Violation | None:
    kv_bytes, tier_bytes = engine.kv_memory_gib << 30, engine.host_tier_bytes
    if engine.host_tier is None:
        return _memory_exceeds(engine.resources, engine.kv_memory, kv_bytes, "kvMemory")
    amount = f"{engine.kv_memory} and {engine.host_tier}"
    return _memory_exceeds(engine.resources, amount, kv_bytes + tier_bytes, "kvMemory and hostTier")


CLUSTER_RULES: tuple[Rule, ...] = (
    Rule(
        "a model that pods can read",
        ModelSpec,
        "source",
        _model_is_reachable,
        CelRule(
            "!self.source.startsWith('path:')",
            "is a local folder, which pods cannot read; use hf:ORGANISATION/NAME, "
            "pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
        ),
    ),
    *(flags.rule for flags in FORBIDDEN_FLAGS),
    Rule(
        "resources exceed the memory tier",
        CacheStoreSpec,
        "resources",
        _store_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(
        "resources exceed the KV cache",
        EngineSpec,
        "resources",
        _engine_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
)


def _volume_unchanged(new: StorageSpec, old: StorageSpec) -> Violation | None:
    if new == old:
        return None
    was = old.size if old.class_name is None else f"{old.size} of class {old.class_name}"
    return Violation(
        "is immutable: Kubernetes does not change the claims of a StatefulSet",
        f"keep {was}, or create another RagCache",
    )


def _cache_unchanged(new: CacheRef, old: CacheRef) -> Violation | None:
    if new.name == old.name:
        return None
    return Violation(
        f"is immutable and was {old.name!r}: the documents would stay in the old RagCache",
        "delete this RagCollection and create one for the other RagCache",
    )


def _collection_unchanged(new: RagCollection, old: RagCollection) -> Violation | None:
    if new.collection_name == old.collection_name:
        return None
    return Violation(
        f"is immutable and was {old.collection_name!r}: the documents would stay in the old "
        "collection",
        "delete this RagCollection and create one for the other collection",
    )


UPDATE_RULES: tuple[UpdateRule, ...] = (
    UpdateRule(
        "storage is immutable",
        StorageSpec,
        "",
        _volume_unchanged,
        CelRule(
            "self == oldSelf",
            "is immutable: Kubernetes does not change the claims of a StatefulSet; keep it, or "
            "create another RagCache",
        ),
    ),
    UpdateRule(
        "cacheRef is immutable",
        CacheRef,
        "name",
        _cache_unchanged,
        CelRule(
            "self.name == oldSelf.name",
            "is immutable: the documents would stay in the old RagCache; delete this RagCollection "
            "and create one for the other RagCache",
        ),
    ),
    UpdateRule(
        "collection is immutable",
        RagCollection,
        "spec.collection",
        _collection_unchanged,
        CelRule(
            "(has(self.spec.collection) ? self.spec.collection : self.metadata.name) == "
            "(has(oldSelf.spec.collection) ? oldSelf.spec.collection : oldSelf.metadata.name)",
            "is immutable: the documents would stay in the old collection; delete this "
            "RagCollection and create one for the other collection",
        ),
    ),
)
