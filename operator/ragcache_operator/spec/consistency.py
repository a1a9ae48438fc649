"""Rules between the fields of one object, which hold in a cluster and under ``ragcache up``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ragcache_operator.spec.cluster import (
    ClientSpec,
    LabelRequirement,
    SchedulingSpec,
    TolerationSpec,
)
from ragcache_operator.spec.collection import SourceSpec, SyncSpec
from ragcache_operator.spec.components.external_engine_rules import EXTERNAL_ENGINE_RULES
from ragcache_operator.spec.components.retriever_rules import RETRIEVER_RULES
from ragcache_operator.spec.engine_arguments import ENGINE_ARGUMENT_RULES
from ragcache_operator.spec.ragcache import (
    BUNDLED_MODELS,
    CacheStoreSpec,
    EngineSpec,
    GatewayAuthSpec,
    GatewaySpec,
    HTTPRouteSpec,
    ModelSpec,
    RagCacheSpec,
)
from ragcache_operator.spec.validation import (
    ENFORCED_BY_SCHEMA,
    NO_CEL_FOR_QUANTITIES,
    CelRule,
    Rule,
    Violation,
)
from ragcache_operator.spec.values import ChunkingSpec, ResourcesSpec

MIN_INTERVAL_S = 10
MAX_INTERVAL_S = 24 * 3600
MIN_STORE_MEMORY_BYTES = 64 << 20


def _overlap_below_half(chunking: ChunkingSpec) -> Violation | None:
    if 2 * chunking.overlap < chunking.size:
        return None
    return Violation(
        f"{chunking.overlap} is not less than half of size {chunking.size}",
        "use about an eighth of the size",
    )


def _length_fits_model(model: ModelSpec) -> Violation | None:
    source = model.parsed_source
    limit = BUNDLED_MODELS[source.value] if source.kind == "bundled" else model.max_length
    if model.max_length <= limit:
        return None
    return Violation(
        f"{model.max_length} is above the context length of {model.source}, {limit} tokens",
        f"use {limit} or less",
    )


def _token_only_for_hub(model: ModelSpec) -> Violation | None:
    if model.token_secret is None or model.parsed_source.kind == "hf":
        return None
    return Violation(
        f"is set, but {model.source} needs no token",
        "leave it out, or set source to hf:ORGANISATION/NAME",
    )


def _ingress_or_http_route(gateway: GatewaySpec) -> Violation | None:
    if gateway.ingress is None or gateway.http_route is None:
        return None
    return Violation("is set together with ingress", "keep the one that your cluster supports")


def _ports_differ(gateway: GatewaySpec) -> Violation | None:
    if gateway.port != gateway.admin_port:
        return None
    return Violation(f"{gateway.admin_port} is the gateway's port, too", "use another port")


def _no_keys_without_auth(auth: GatewayAuthSpec) -> Violation | None:
    if auth.enabled or auth.secret_ref is None:
        return None
    return Violation("is set, but enabled is false", "leave it out, or set enabled to true")


def _max_replicas_at_least_replicas(component: GatewaySpec | EngineSpec) -> Violation | None:
    autoscaling, replicas = component.autoscaling, component.replicas
    if autoscaling is None or autoscaling.max_replicas >= replicas:
        return None
    return Violation(
        f"{autoscaling.max_replicas} is below replicas, which is {replicas}",
        f"use {replicas} or more, or lower replicas",
    )


def _memory_limit_at_least_request(resources: ResourcesSpec) -> Violation | None:
    request, limit = resources.memory_bytes, resources.memory_limit_bytes
    if request is None or limit is None or limit >= request:
        return None
    return Violation(
        f"{resources.memory_limit} is below the memory request, {resources.memory}",
        f"use {resources.memory} or more",
    )


def _engine_names_differ(spec: RagCacheSpec) -> Violation | None:
    names = [engine.name for engine in spec.engines]
    return _first_duplicate(names, "name")


def _pull_secrets_differ(scheduling: SchedulingSpec) -> Violation | None:
    return _first_duplicate([secret.name for secret in scheduling.image_pull_secrets], "name")


def _hostnames_differ(route: HTTPRouteSpec) -> Violation | None:
    return _first_duplicate(route.hostnames)


def _admission_fits_the_policy(store: CacheStoreSpec) -> Violation | None:
    if store.admission != "score" or store.policy == "score":
        return None
    return Violation(
        f"score requires policy score, and policy is {store.policy}",
        "use policy score, or admission always or secondTouch",
    )


def _memory_holds_transfers(store: CacheStoreSpec) -> Violation | None:
    if store.memory_bytes >= MIN_STORE_MEMORY_BYTES:
        return None
    return Violation(
        f"{store.memory} is too small for values in transit",
        "use at least 64Mi, and at least four times the size of the largest variant",
    )


def _first_duplicate(names: Sequence[str], field: str = "") -> Violation | None:
    for i, name in enumerate(names):
        if name in names[:i]:
            subpath = f"[{i}].{field}" if field else f"[{i}]"
            return Violation(f"{name!r} is used twice", "use a different name", subpath)
    return None


def _values_fit_the_operator(requirement: LabelRequirement) -> Violation | None:
    needs_values = requirement.operator in ("In", "NotIn")
    if needs_values and not requirement.values:
        return Violation(f"{requirement.operator} needs a value", "list at least one value")
    if not needs_values and requirement.values:
        return Violation(f"{requirement.operator} takes no values", "leave them out")
    return None


def _selects_something(client: ClientSpec) -> Violation | None:
    if client.namespace_selector is not None or client.pod_selector is not None:
        return None
    return Violation("has no selector", "set namespaceSelector, podSelector or both")


def _key_unless_exists(toleration: TolerationSpec) -> Violation | None:
    if toleration.key is not None or toleration.operator == "Exists":
        return None
    return Violation("is missing, and operator is not Exists", "name the taint's key")


def _exists_has_no_value(toleration: TolerationSpec) -> Violation | None:
    if toleration.operator == "Equal" or not toleration.value:
        return None
    return Violation("is set, but operator Exists ignores it", "leave it out, or use Equal")


def _seconds_need_no_execute(toleration: TolerationSpec) -> Violation | None:
    if toleration.toleration_seconds is None or toleration.effect == "NoExecute":
        return None
    return Violation("is set, but effect is not NoExecute", "leave it out, or use NoExecute")


def _interval_is_in_range(sync: SyncSpec) -> Violation | None:
    if MIN_INTERVAL_S <= sync.interval_s <= MAX_INTERVAL_S:
        return None
    return Violation(f"{sync.interval} is out of range", "use 10s to 24h")


def _is_one_source(source: SourceSpec) -> Violation | None:
    given = source.given
    if not given:
        return Violation("names no source", "set one of configMap, volume, http, git")
    if len(given) > 1:
        return Violation(
            f"names {len(given)} sources: {', '.join(given)}", "put each into a separate item"
        )
    return None


def _bundled_lengths() -> Iterator[str]:
    for name, limit in BUNDLED_MODELS.items():
        yield f"self.source != 'bundled:{name}' || self.maxLength <= {limit}"


_AUTOSCALING = CelRule(
    "!has(self.autoscaling) || self.autoscaling.maxReplicas >= self.replicas",
    "is below replicas; use at least the value of replicas",
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
        "maxLength within the bundled model's context length",
        ModelSpec,
        "maxLength",
        _length_fits_model,
        CelRule(
            " && ".join(f"({condition})" for condition in _bundled_lengths()),
            "is above the context length of the bundled model; use "
            + ", ".join(f"{limit} or less for {name}" for name, limit in BUNDLED_MODELS.items()),
        ),
    ),
    Rule(
        "tokenSecret only for a hub model",
        ModelSpec,
        "tokenSecret",
        _token_only_for_hub,
        CelRule(
            "!has(self.tokenSecret) || self.source.startsWith('hf:')",
            "is set, but only an hf: source needs a token; leave it out, or set source to "
            "hf:ORGANISATION/NAME",
        ),
    ),
    Rule(
        "ingress or httpRoute",
        GatewaySpec,
        "httpRoute",
        _ingress_or_http_route,
        CelRule(
            "!has(self.ingress) || !has(self.httpRoute)",
            "is set together with ingress; keep the one that your cluster supports",
        ),
    ),
    Rule(
        "two ports of the gateway",
        GatewaySpec,
        "adminPort",
        _ports_differ,
        CelRule(
            "self.adminPort != self.port",
            "is the gateway's port, too; use another port",
        ),
    ),
    Rule(
        "no keys without auth",
        GatewayAuthSpec,
        "secretRef",
        _no_keys_without_auth,
        CelRule(
            "!has(self.secretRef) || self.enabled == true",
            "is set, but enabled is false; leave it out, or set enabled to true",
        ),
    ),
    Rule(
        "gateway's maxReplicas at least replicas",
        GatewaySpec,
        "autoscaling.maxReplicas",
        _max_replicas_at_least_replicas,
        _AUTOSCALING,
    ),
    Rule(
        "engine's maxReplicas at least replicas",
        EngineSpec,
        "autoscaling.maxReplicas",
        _max_replicas_at_least_replicas,
        _AUTOSCALING,
    ),
    *EXTERNAL_ENGINE_RULES,
    *RETRIEVER_RULES,
    Rule(
        "memory limit at least the request",
        ResourcesSpec,
        "memoryLimit",
        _memory_limit_at_least_request,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(
        "admission fits the policy",
        CacheStoreSpec,
        "admission",
        _admission_fits_the_policy,
        CelRule(
            "!has(self.admission) || self.admission != 'score' || self.policy == 'score'",
            "score requires policy score, and policy is another one; use policy score, or "
            "admission always or secondTouch",
        ),
    ),
    Rule(
        "store memory holds values in transit",
        CacheStoreSpec,
        "memory",
        _memory_holds_transfers,
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
            "do not fit the operator; list at least one for In and NotIn, none for Exists and "
            "DoesNotExist",
        ),
    ),
    Rule("a client selects something", ClientSpec, "", _selects_something, ENFORCED_BY_SCHEMA),
    Rule(
        "a toleration's key unless it matches every taint",
        TolerationSpec,
        "key",
        _key_unless_exists,
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
            "is set, but operator Exists ignores it; leave it out, or use Equal",
        ),
    ),
    Rule(
        "seconds only for NoExecute",
        TolerationSpec,
        "tolerationSeconds",
        _seconds_need_no_execute,
        CelRule(
            "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            "is set, but effect is not NoExecute; leave it out, or use NoExecute",
        ),
    ),
    Rule(
        "interval in range",
        SyncSpec,
        "interval",
        _interval_is_in_range,
        CelRule(
            f"duration(self.interval) >= duration('{MIN_INTERVAL_S}s') && "
            f"duration(self.interval) <= duration('{MAX_INTERVAL_S}s')",
            "is out of range; use 10s to 24h",
        ),
    ),
    *ENGINE_ARGUMENT_RULES,
    Rule("exactly one source", SourceSpec, "", _is_one_source, ENFORCED_BY_SCHEMA),
)
