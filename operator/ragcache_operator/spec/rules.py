"""Everything a cluster has to refuse about a RagCache or a RagCollection; pure.

The webhook asks this before an object is stored; the operator asks it before it acts, because there
may be no webhook; the cli asks it before it sends anything.
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
from ragcache_operator.spec.consistency import (
    NO_CEL_FOR_QUANTITIES,
    CelRule,
    Rule,
    Violation,
    check_rules,
    walk_models,
)
from ragcache_operator.spec.manifest import InvalidManifest, parse, read


@dataclass(frozen=True, slots=True)
class ForbiddenFlags:
    """Arguments of vLLM's server that no engine may be given.

    problem: what is wrong with them all. fixes: by argument, what to do instead.
    """

    name: str
    problem: str
    fixes: Mapping[str, str]

    @property
    def rule(self) -> Rule:
        """That an engine's args hold none of them."""
        return Rule(
            self.name,
            EngineSpec,
            "args",
            self._check,
            CelRule(
                f"!has(self.args) || !self.args.exists(argument, argument.matches('{self._any}'))",
                f"hold one that {self.problem}; leave out {', '.join(self.fixes)}",
            ),
        )

    def _check(self, engine: EngineSpec) -> Violation | None:
        for i, argument in enumerate(engine.args):
            flag = _flag_of(argument)
            for owned, fix in self.fixes.items():
                if flag == owned:
                    return Violation(f"{flag} {self.problem}", fix, f"[{i}]")
                if len(flag) > len("--") and owned.startswith(flag):
                    return Violation(f"{flag}, read as {owned}, {self.problem}", fix, f"[{i}]")
        return None

    @property
    def _any(self) -> str:
        """A pattern of all their spellings; re2's, without a backslash."""
        return f"^--({'|'.join(_beginnings(flag[2:]) for flag in self.fixes)})([=.]|$)"


def _flag_of(argument: str) -> str:
    """The flag of an argument as vLLM reads it: with dashes, up to its value or a key of one.

    --max_model_len=9 is --max-model-len 9, --kv-transfer-config.kv_role=x one key of a value.
    """
    return re.split("[=.]", argument, maxsplit=1)[0].replace("_", "-")


def _beginnings(word: str) -> str:
    """A pattern of every beginning of a word: argparse takes one for the flag that it begins.

    Where it begins several, argparse refuses it, so nothing that works is refused here as long as
    no flag of vLLM's is the beginning of one of these.
    """
    letters = ["[-_]" if letter == "-" else letter for letter in word]
    return "(".join(letters) + ")?" * (len(letters) - 1)


_LEAVE_OUT: Final = "leave it out"
# Groups are as small as they are because servers limit what the pattern of one rule may cost.
FORBIDDEN_FLAGS: Final = (
    ForbiddenFlags(
        "no arguments that fields set",
        "is set by RagCache itself",
        {
            "--model": "set spec.model.source",
            "--served-model-name": "set spec.model.name",
            "--max-model-len": "set spec.model.maxLength",
            "--dtype": "set spec.model.dtype",
        },
    ),
    ForbiddenFlags(
        "engines listen where they are looked for",
        "moves the engine's server, and nothing would find it",
        dict.fromkeys(
            ("--host", "--port", "--uds", "--root-path", "--grpc", "--headless"), _LEAVE_OUT
        ),
    ),
    ForbiddenFlags(
        "engines answer as they are asked",
        "makes the engine refuse what it is asked",
        dict.fromkeys(
            ("--api-key", "--ssl-keyfile", "--ssl-certfile", "--tokens-only"), _LEAVE_OUT
        ),
    ),
    ForbiddenFlags(
        "engines have our connector",
        "takes the place of what RagCache sets itself",
        dict.fromkeys(("--kv-transfer-config", "--config"), _LEAVE_OUT),
    ),
)
"""What follows from other fields, and what would cut an engine off from the rest.

Others are their user's own affair. --ssl-ca-certs and the like do nothing without a certificate,
--data-parallel-size and the like leave the server where it is, and --load-format or --tokenizer
change what is answered, not whether.
"""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """What an update may not change about the values of one model.

    field: what is to blame, below the value, as manifests write it; empty: the value itself.
    fault: of the new value beside the old one; None where nothing forbidden changed.
    """

    name: str
    model: type[BaseModel]
    field: str
    check: Callable[[Any, Any], Violation | None]
    cel: CelRule


def find_problems(
    new: Mapping[str, Any], old: Mapping[str, Any] | None = None
) -> list[InvalidInput]:
    """Everything wrong with an object of either kind, in a cluster. old: what an update replaces.

    An object whose spec an update leaves alone, or that is on its way out, is let through: what a
    newer version finds wrong with it must not keep anybody from removing a finalizer.
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
    found = check_rules(CLUSTER_RULES, value)
    if old is not None:
        found += _forbidden_changes(value, old)
    return found


def _forbidden_changes(new: BaseModel, old: Mapping[str, Any]) -> list[InvalidInput]:
    try:
        before = dict(walk_models(read(old)))
    except InvalidManifest:
        # Nothing was ever made of it, so nothing stands in the way.
        return []
    found = []
    for path, value in walk_models(new):
        for rule in UPDATE_RULES:
            if type(value) is not rule.model or type(before.get(path)) is not rule.model:
                continue
            check = rule.check(value, before[path])
            if check is not None:
                field = ".".join(piece for piece in (path, rule.field) if piece)
                found.append(InvalidInput(field, check.problem, check.fix))
    return found


def _model_is_in_the_cluster(model: ModelSpec) -> Violation | None:
    if model.parsed_source.kind != "path":
        return None
    return Violation(
        f"{model.source} is a folder of one machine, which pods do not see",
        "use hf:ORGANISATION/NAME, pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
    )


def _memory_holds(
    resources: ResourcesSpec, needed: str, num_bytes: int, what: str
) -> Violation | None:
    """Both amounts have to be above what the part fills by design, whatever else it needs."""
    for field, text, given in (
        ("memory", resources.memory, resources.memory_bytes),
        ("memoryLimit", resources.memory_limit, resources.memory_limit_bytes),
    ):
        if given is not None and given <= num_bytes:
            return Violation(
                f"{text} does not hold the {needed} of {what}",
                f"use well over {needed}, or leave it out to have it derived",
                f".{field}",
            )
    return None


def _store_fits(store: CacheStoreSpec) -> Violation | None:
    return _memory_holds(store.resources, store.memory, store.memory_bytes, "memory")


def _engine_fits(engine: EngineSpec) -> Violation | None:
    kv_bytes, tier_bytes = engine.kv_memory_gib << 30, engine.host_tier_bytes
    if engine.host_tier is None:
        return _memory_holds(engine.resources, engine.kv_memory, kv_bytes, "kvMemory")
    needed = f"{engine.kv_memory} and {engine.host_tier}"
    return _memory_holds(engine.resources, needed, kv_bytes + tier_bytes, "kvMemory and hostTier")


CLUSTER_RULES: tuple[Rule, ...] = (
    Rule(
        "a model that pods see",
        ModelSpec,
        "source",
        _model_is_in_the_cluster,
        CelRule(
            "!self.source.startsWith('path:')",
            "is a folder of one machine, which pods do not see; use hf:ORGANISATION/NAME, "
            "pvc:CLAIM/FOLDER or image:REFERENCE in a cluster",
        ),
    ),
    *(flags.rule for flags in FORBIDDEN_FLAGS),
    Rule(
        "memory holds the memory tier",
        CacheStoreSpec,
        "resources",
        _store_fits,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule("memory holds the KV cache", EngineSpec, "resources", _engine_fits, NO_CEL_FOR_QUANTITIES),
)


def _volume_stays(new: StorageSpec, old: StorageSpec) -> Violation | None:
    if new == old:
        return None
    was = old.size if old.class_name is None else f"{old.size} of class {old.class_name}"
    return Violation(
        "cannot change: Kubernetes does not change the claims of a StatefulSet",
        f"keep {was}, or make another RagCache with what you need",
    )


def _cache_stays(new: CacheRef, old: CacheRef) -> Violation | None:
    if new.name == old.name:
        return None
    return Violation(
        f"cannot change from {old.name!r}: its documents would stay behind",
        "delete this RagCollection and make one for the other RagCache",
    )


def _collection_stays(new: RagCollection, old: RagCollection) -> Violation | None:
    if new.collection_name == old.collection_name:
        return None
    return Violation(
        f"cannot change from {old.collection_name!r}: its documents would stay behind",
        "delete this RagCollection and make one for the other collection",
    )


UPDATE_RULES: tuple[UpdateRule, ...] = (
    UpdateRule(
        "volumes stay",
        StorageSpec,
        "",
        _volume_stays,
        CelRule(
            "self == oldSelf",
            "cannot change: Kubernetes does not change the claims of a StatefulSet; keep it, or "
            "make another RagCache with what you need",
        ),
    ),
    UpdateRule(
        "the RagCache stays",
        CacheRef,
        "name",
        _cache_stays,
        CelRule(
            "self.name == oldSelf.name",
            "cannot change: its documents would stay behind; delete this RagCollection and make "
            "one for the other RagCache",
        ),
    ),
    UpdateRule(
        "the collection stays",
        RagCollection,
        "spec.collection",
        _collection_stays,
        CelRule(
            "(has(self.spec.collection) ? self.spec.collection : self.metadata.name) == "
            "(has(oldSelf.spec.collection) ? oldSelf.spec.collection : oldSelf.metadata.name)",
            "cannot change: its documents would stay behind; delete this RagCollection and make "
            "one for the other collection",
        ),
    ),
)
