"""What must hold between the fields of one object, wherever it runs.

Each rule stands here twice, side by side: in Python for the parser, the webhook and the operator,
and in CEL for API servers that know it, with the field to blame (1.28 and later).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import SourceSpec, SyncSpec
from ragcache_operator.spec.ragcache import (
    BUNDLED_EMBEDDER,
    BUNDLED_MODELS,
    CacheStoreSpec,
    ClientSpec,
    EmbedderSpec,
    EngineSpec,
    GatewaySpec,
    HTTPRouteSpec,
    LabelRequirement,
    ModelSpec,
    RagCacheSpec,
    SchedulingSpec,
    TolerationSpec,
)
from ragcache_operator.spec.values import ChunkingSpec, ResourcesSpec

SHORTEST_INTERVAL_S = 10
LONGEST_INTERVAL_S = 24 * 3600
LEAST_STORE_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a rule does not hold. at: where below the value, for what only the value knows."""

    problem: str
    fix: str
    at: str = ""


@dataclass(frozen=True, slots=True)
class CelRule:
    """A rule as the API server has it.

    expression: true where the rule holds. message: problem and fix, like a Fault's, without values.
    """

    expression: str
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule about the values of one model.

    field: what is to blame, below the value, as manifests write it; empty: the value itself.
    fault: None where the rule holds. cel: its twin, or else why it has none.
    """

    name: str
    model: type[BaseModel]
    field: str
    check: Callable[[Any], Violation | None]
    cel: CelRule | str


ENFORCED_BY_SCHEMA = "the schema says it"
NO_CEL_FOR_QUANTITIES = (
    "CEL compares quantities from 1.29 on, and an expression with them makes older servers refuse "
    "the whole definition"
)


def check_rules(rules: Sequence[Rule], value: BaseModel, path: str = "") -> list[InvalidInput]:
    """Everything in value, and below it, that breaks one of rules. path: of value itself."""
    found = []
    for at, part in walk_models(value, path):
        for rule in rules:
            if type(part) is rule.model and (check := rule.check(part)) is not None:
                field = ".".join(piece for piece in (at, rule.field) if piece) + check.at
                found.append(InvalidInput(field, check.problem, check.fix))
    return found


def walk_models(value: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Value and every mapping below it, each with its path as manifests write it."""
    yield path, value
    for name, field in type(value).model_fields.items():
        below = getattr(value, name)
        at = ".".join(piece for piece in (path, field.alias or name) if piece)
        if isinstance(below, BaseModel):
            yield from walk_models(below, at)
        elif isinstance(below, tuple):
            for i, item in enumerate(below):
                if isinstance(item, BaseModel):
                    yield from walk_models(item, f"{at}[{i}]")


def _overlap_below_half(chunking: ChunkingSpec) -> Violation | None:
    if 2 * chunking.overlap < chunking.size:
        return None
    return Violation(
        f"{chunking.overlap} is not less than half of size {chunking.size}",
        "use about an eighth of the size",
    )


def _length_is_known(model: ModelSpec) -> Violation | None:
    source = model.parsed_source
    limit = BUNDLED_MODELS[source.value] if source.kind == "bundled" else model.max_length
    if model.max_length <= limit:
        return None
    return Violation(
        f"{model.max_length} is over the {limit} tokens that {model.source} knows",
        f"use {limit} or less",
    )


def _token_for_the_hub(model: ModelSpec) -> Violation | None:
    if model.token_secret is None or model.parsed_source.kind == "hf":
        return None
    return Violation(
        f"is given, but {model.source} needs no token",
        "leave it out, or name a model of the hub as source, like hf:ORGANISATION/NAME",
    )


def _one_way_in(gateway: GatewaySpec) -> Violation | None:
    if gateway.ingress is None or gateway.http_route is None:
        return None
    return Violation("is given beside ingress", "keep the one that your cluster has")


def _most_is_not_below_fewest(part: GatewaySpec | EngineSpec) -> Violation | None:
    if part.autoscaling is None or part.autoscaling.max_replicas >= part.replicas:
        return None
    return Violation(
        f"{part.autoscaling.max_replicas} is below replicas, the {part.replicas} that always run",
        f"use {part.replicas} or more, or lower replicas",
    )


def _no_model_when_bundled(embedder: EmbedderSpec) -> Violation | None:
    if embedder.source != BUNDLED_EMBEDDER or embedder.model is None:
        return None
    return Violation(
        "is given, but the bundled embedder has only one",
        "leave it out, or name an endpoint's URL as source",
    )


def _model_with_a_url(embedder: EmbedderSpec) -> Violation | None:
    if embedder.source == BUNDLED_EMBEDDER or embedder.model is not None:
        return None
    return Violation("is missing: an endpoint serves many models", "name the one to ask for")


def _no_key_when_bundled(embedder: EmbedderSpec) -> Violation | None:
    if embedder.source != BUNDLED_EMBEDDER or embedder.key_secret is None:
        return None
    return Violation(
        "is given, but the bundled embedder needs no key",
        "leave it out, or name an endpoint's URL as source",
    )


def _limit_holds_the_request(resources: ResourcesSpec) -> Violation | None:
    request, limit = resources.memory_bytes, resources.memory_limit_bytes
    if request is None or limit is None or limit >= request:
        return None
    return Violation(
        f"{resources.memory_limit} is below the {resources.memory} that memory requests",
        f"use {resources.memory} or more",
    )


def _engine_names_differ(spec: RagCacheSpec) -> Violation | None:
    names = [engine.name for engine in spec.engines]
    return _twice(names, "name")


def _pull_secrets_differ(scheduling: SchedulingSpec) -> Violation | None:
    return _twice([secret.name for secret in scheduling.image_pull_secrets], "name")


def _hostnames_differ(route: HTTPRouteSpec) -> Violation | None:
    return _twice(route.hostnames)


def _admission_fits_the_policy(store: CacheStoreSpec) -> Violation | None:
    if store.admission != "score" or store.policy == "score":
        return None
    return Violation(
        f"score compares scores, and policy {store.policy} has none",
        "use policy score, or admission always or secondTouch",
    )


def _memory_holds_values(store: CacheStoreSpec) -> Violation | None:
    if store.memory_bytes >= LEAST_STORE_MEMORY_BYTES:
        return None
    return Violation(
        f"{store.memory} does not hold the values that are on their way in and out",
        "use 64Mi or more, and four times the largest chunk-cache at least",
    )


def _twice(names: Sequence[str], field: str = "") -> Violation | None:
    for i, name in enumerate(names):
        if name in names[:i]:
            at = f"[{i}].{field}" if field else f"[{i}]"
            return Violation(f"{name!r} is there already", "give each its own", at)
    return None


def _values_fit_the_operator(requirement: LabelRequirement) -> Violation | None:
    compares = requirement.operator in ("In", "NotIn")
    if compares and not requirement.values:
        return Violation(f"{requirement.operator} compares with nothing", "list one value or more")
    if not compares and requirement.values:
        return Violation(f"{requirement.operator} takes no values", "leave them out")
    return None


def _selects_something(client: ClientSpec) -> Violation | None:
    if client.namespace_selector is not None or client.pod_selector is not None:
        return None
    return Violation("selects nobody", "give namespaceSelector, podSelector or both")


def _no_key_means_every_taint(toleration: TolerationSpec) -> Violation | None:
    if toleration.key is not None or toleration.operator == "Exists":
        return None
    return Violation("is missing, and operator is not Exists", "name the taint's key")


def _exists_has_no_value(toleration: TolerationSpec) -> Violation | None:
    if toleration.operator == "Equal" or not toleration.value:
        return None
    return Violation("is given, but operator Exists looks at none", "leave it out, or use Equal")


def _seconds_need_no_execute(toleration: TolerationSpec) -> Violation | None:
    if toleration.toleration_seconds is None or toleration.effect == "NoExecute":
        return None
    return Violation("is given, but only NoExecute ends", "leave it out, or use effect NoExecute")


def _interval_is_in_range(sync: SyncSpec) -> Violation | None:
    if SHORTEST_INTERVAL_S <= sync.interval_s <= LONGEST_INTERVAL_S:
        return None
    return Violation(f"{sync.interval} is out of range", "use 10s to 24h")


def _is_one_source(source: SourceSpec) -> Violation | None:
    given = source.given
    if not given:
        return Violation("names no source", "give one of configMap, volume, http, git")
    if len(given) > 1:
        return Violation(
            f"names {len(given)} sources: {', '.join(given)}", "put each into an item of its own"
        )
    return None


def _bundled_lengths() -> Iterator[str]:
    for name, limit in BUNDLED_MODELS.items():
        yield f"self.source != 'bundled:{name}' || self.maxLength <= {limit}"


_AUTOSCALING = CelRule(
    "!has(self.autoscaling) || self.autoscaling.maxReplicas >= self.replicas",
    "is below replicas, which always run; use replicas or more",
)

CONSISTENCY: tuple[Rule, ...] = (
    Rule(
        "overlap below half of size",
        ChunkingSpec,
        "overlap",
        _overlap_below_half,
        CelRule(
            "2 * self.overlap < self.size",
            "is not less than half of size; use about an eighth of the size",
        ),
    ),
    Rule(
        "length the bundled model knows",
        ModelSpec,
        "maxLength",
        _length_is_known,
        CelRule(
            " && ".join(f"({condition})" for condition in _bundled_lengths()),
            "is over what the bundled model knows; use "
            + ", ".join(f"{limit} or less for {name}" for name, limit in BUNDLED_MODELS.items()),
        ),
    ),
    Rule(
        "token only for the hub",
        ModelSpec,
        "tokenSecret",
        _token_for_the_hub,
        CelRule(
            "!has(self.tokenSecret) || self.source.startsWith('hf:')",
            "is given, but only an hf: source needs a token; leave it out, or name a model of the "
            "hub as source, like hf:ORGANISATION/NAME",
        ),
    ),
    Rule(
        "one way in",
        GatewaySpec,
        "httpRoute",
        _one_way_in,
        CelRule(
            "!has(self.ingress) || !has(self.httpRoute)",
            "is given beside ingress; keep the one that your cluster has",
        ),
    ),
    Rule(
        "gateway's maxReplicas from replicas on",
        GatewaySpec,
        "autoscaling.maxReplicas",
        _most_is_not_below_fewest,
        _AUTOSCALING,
    ),
    Rule(
        "engine's maxReplicas from replicas on",
        EngineSpec,
        "autoscaling.maxReplicas",
        _most_is_not_below_fewest,
        _AUTOSCALING,
    ),
    Rule(
        "no model for the bundled embedder",
        EmbedderSpec,
        "model",
        _no_model_when_bundled,
        CelRule(
            f"self.source != '{BUNDLED_EMBEDDER}' || !has(self.model)",
            "is given, but the bundled embedder has only one; leave it out, or name an endpoint's "
            "URL as source",
        ),
    ),
    Rule(
        "a model for an endpoint",
        EmbedderSpec,
        "model",
        _model_with_a_url,
        CelRule(
            f"self.source == '{BUNDLED_EMBEDDER}' || has(self.model)",
            "is missing: an endpoint serves many models; name the one to ask for",
        ),
    ),
    Rule(
        "no key for the bundled embedder",
        EmbedderSpec,
        "keySecret",
        _no_key_when_bundled,
        CelRule(
            f"self.source != '{BUNDLED_EMBEDDER}' || !has(self.keySecret)",
            "is given, but the bundled embedder needs no key; leave it out, or name an endpoint's "
            "URL as source",
        ),
    ),
    Rule(
        "memory limit from the request on",
        ResourcesSpec,
        "memoryLimit",
        _limit_holds_the_request,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(
        "admission fits the policy",
        CacheStoreSpec,
        "admission",
        _admission_fits_the_policy,
        CelRule(
            "self.admission != 'score' || self.policy == 'score'",
            "score compares scores, and the policy has none; use policy score, or admission always "
            "or secondTouch",
        ),
    ),
    Rule(
        "store's memory holds values",
        CacheStoreSpec,
        "memory",
        _memory_holds_values,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule("engine names differ", RagCacheSpec, "engines", _engine_names_differ, ENFORCED_BY_SCHEMA),
    Rule(
        "pull secrets differ",
        SchedulingSpec,
        "imagePullSecrets",
        _pull_secrets_differ,
        ENFORCED_BY_SCHEMA,
    ),
    Rule("host names differ", HTTPRouteSpec, "hostnames", _hostnames_differ, ENFORCED_BY_SCHEMA),
    Rule(
        "label values fit the operator",
        LabelRequirement,
        "values",
        _values_fit_the_operator,
        CelRule(
            "(self.operator == 'In' || self.operator == 'NotIn') == "
            "(has(self.values) && size(self.values) > 0)",
            "do not fit the operator; list some for In and NotIn, none for Exists and DoesNotExist",
        ),
    ),
    Rule("a client selects something", ClientSpec, "", _selects_something, ENFORCED_BY_SCHEMA),
    Rule(
        "a taint's key unless every taint",
        TolerationSpec,
        "key",
        _no_key_means_every_taint,
        CelRule(
            "has(self.key) || self.operator == 'Exists'",
            "is missing, and operator is not Exists; name the taint's key",
        ),
    ),
    Rule(
        "no value for Exists",
        TolerationSpec,
        "value",
        _exists_has_no_value,
        CelRule(
            "self.operator == 'Equal' || !has(self.value) || self.value == ''",
            "is given, but operator Exists looks at none; leave it out, or use Equal",
        ),
    ),
    Rule(
        "seconds only for NoExecute",
        TolerationSpec,
        "tolerationSeconds",
        _seconds_need_no_execute,
        CelRule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "is given, but only NoExecute ends; leave it out, or use effect NoExecute",
        ),
    ),
    Rule(
        "interval in range",
        SyncSpec,
        "interval",
        _interval_is_in_range,
        CelRule(
            f"duration(self.interval) >= duration('{SHORTEST_INTERVAL_S}s') && "
            f"duration(self.interval) <= duration('{LONGEST_INTERVAL_S}s')",
            "is out of range; use 10s to 24h",
        ),
    ),
    Rule("exactly one source", SourceSpec, "", _is_one_source, ENFORCED_BY_SCHEMA),
)
