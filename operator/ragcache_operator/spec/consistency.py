"""Rules between the fields of one object, which hold in a cluster and under ``ragcache up``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ragcache_core.access.caller import Scope
from ragcache_operator.spec.cluster import (
    ClientSpec,
    LabelRequirement,
)
from ragcache_operator.spec.collection import SourceSpec, SyncSpec
from ragcache_operator.spec.engine_arguments import ENGINE_ARGUMENT_RULES
from ragcache_operator.spec.oidc import OidcIssuerSpec
from ragcache_operator.spec.pods import (
    EnvSourceSpec,
    EnvVarSpec,
    PodTemplateSpec,
    TolerationSpec,
)
from ragcache_operator.spec.ragcache import (
    BUNDLED_KV_HEADS,
    BUNDLED_MODELS,
    RANK_SHARED_BYTES,
    CacheStoreSpec,
    EngineSpec,
    GatewayAuthSpec,
    GatewayServiceSpec,
    GatewaySpec,
    HTTPRouteSpec,
    ModelSpec,
    PrecisionSpec,
    RagCache,
    RagCacheSpec,
)
from ragcache_operator.spec.retriever import (
    CROSS_ENCODER,
    CROSS_ENCODER_MODEL,
    BackendSpec,
    EmbedderSpec,
    RerankerSpec,
    RetrieverSpec,
)
from ragcache_operator.spec.validation import (
    ENFORCED_BY_SCHEMA,
    NO_CEL_FOR_ITEMS,
    NO_CEL_FOR_METADATA,
    NO_CEL_FOR_NAMES,
    NO_CEL_FOR_QUANTITIES,
    Rule,
    Violation,
    cel_rule,
)
from ragcache_operator.spec.values import ChunkingSpec, ResourcesSpec

MIN_INTERVAL_S = 10
MAX_INTERVAL_S = 24 * 3600
MIN_STORE_MEMORY_BYTES = 64 << 20


def _cpu_limit_at_least_request(resources: ResourcesSpec) -> Violation | None:
    request, limit = resources.cpu_millis, resources.cpu_limit_millis
    if request is None or limit is None or limit >= request:
        return None
    return Violation(
        f"{resources.cpu_limit} is below the CPU request, {resources.cpu}",
        f"use {resources.cpu} or more",
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


def _first_model_has_engines(spec: RagCacheSpec) -> Violation | None:
    first = spec.model.served_name
    if any(spec.model_of(engine).served_name == first for engine in spec.engines):
        return None
    return Violation(
        f"have no group that serves spec.model, {first!r}",
        "leave out model in one group, or make it spec.model",
    )


def _same_name_is_same_model(spec: RagCacheSpec) -> Violation | None:
    known = {model.served_name: model for model in spec.models}
    for i, engine in enumerate(spec.engines):
        name = spec.model_of(engine).served_name
        if known[name] != spec.model_of(engine):
            return Violation(
                f"{name!r} is the name of another model, too",
                "set the same fields for both, or another name",
                f"[{i}].model.name",
            )
    return None


def _same_model_same_ranks(spec: RagCacheSpec) -> Violation | None:
    for i, engine in enumerate(spec.engines):
        model = spec.model_of(engine)
        if engine.url is None and engine.tensor_parallel != spec.ranks_of(model):
            return Violation(
                f"is {engine.tensor_parallel}, and another group of {model.served_name!r} has "
                f"{spec.ranks_of(model)}: the ranks of both would store different heads",
                "set the same number for both",
                f"[{i}].tensorParallel",
            )
    return None


def _ranks_have_heads(spec: RagCacheSpec) -> Violation | None:
    for i, engine in enumerate(spec.engines):
        source = spec.model_of(engine).parsed_source
        heads = BUNDLED_KV_HEADS.get(source.value) if source.kind == "bundled" else None
        if engine.url is None and heads is not None and heads % engine.tensor_parallel:
            return Violation(
                f"is {engine.tensor_parallel}, and {source.value} has {heads} KV heads",
                f"use a number that divides {heads}",
                f"[{i}].tensorParallel",
            )
    return None


def _ranks_have_cores(engine: EngineSpec) -> Violation | None:
    limit = engine.resources.cpu_limit_millis
    is_enough = limit is not None and limit >= 1000 * engine.tensor_parallel
    is_on_cpu = engine.url is None and engine.device == "cpu"
    if engine.tensor_parallel == 1 or not is_on_cpu or is_enough:
        return None
    return Violation(
        "is below one core for each rank, or unset: the ranks share these cores",
        f'use "{engine.tensor_parallel}" or more, or set tensorParallel to 1',
    )


def _shared_memory_holds_ranks(engine: EngineSpec) -> Violation | None:
    least = engine.tensor_parallel * RANK_SHARED_BYTES
    if engine.tensor_parallel == 1 or engine.shared_memory_bytes >= least:
        return None
    return Violation(
        f"is too small for the {engine.tensor_parallel} ranks, which communicate through it",
        f"use {least >> 20}Mi or more, or leave it out",
    )


def _tokens_are_equal(spec: RagCacheSpec) -> Violation | None:
    tokens = [model.token_secret for model in spec.models if model.token_secret is not None]
    for i, engine in enumerate(spec.engines):
        if engine.model and engine.model.token_secret not in (None, tokens[0] if tokens else None):
            return Violation(
                "is another Secret than that of the first model",
                "use one token for all models, because the gateway reads all of them",
                f"[{i}].model.tokenSecret",
            )
    return None


def _pull_secrets_differ(template: PodTemplateSpec) -> Violation | None:
    return _first_duplicate([secret.name for secret in template.image_pull_secrets], "name")


def _variables_differ(spec: RagCacheSpec) -> Violation | None:
    return _first_duplicate([variable.name for variable in spec.env], "name")


def _is_one_value_source(source: EnvSourceSpec) -> Violation | None:
    if (source.secret_key_ref is None) != (source.config_map_key_ref is None):
        return None
    return Violation("does not name one source", "set secretKeyRef or configMapKeyRef")


def _hostnames_differ(route: HTTPRouteSpec) -> Violation | None:
    return _first_duplicate(route.hostnames)


def _ranges_differ(service: GatewayServiceSpec) -> Violation | None:
    return _first_duplicate(service.load_balancer_source_ranges)


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


def _selects_something(client: ClientSpec) -> Violation | None:
    if client.namespace_selector is not None or client.pod_selector is not None:
        return None
    return Violation("has no selector", "set namespaceSelector, podSelector or both")


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


def _issuer_names_differ(gateway: GatewaySpec) -> Violation | None:
    return _first_duplicate([one.name for one in gateway.oidc], "name")


def _issuers_differ(gateway: GatewaySpec) -> Violation | None:
    return _first_duplicate([one.issuer for one in gateway.oidc], "issuer")


def _max_replicas(component: type[GatewaySpec | EngineSpec]) -> Rule:
    return cel_rule(
        component,
        "autoscaling.maxReplicas",
        "!has(self.autoscaling) || self.autoscaling.maxReplicas >= self.replicas",
        "is below replicas",
        "use at least the value of replicas, or lower replicas",
    )


_PROBLEM: Final = "is set together with url, and RagCache does not run this engine"
_FIX: Final = "leave it out, or leave out url"

_CONDITIONS: Final = {
    "role": "self.role == 'both'",
    "device": "self.device == 'cpu'",
    "tensorParallel": "self.tensorParallel == 1",
    "replicas": "self.replicas == 1",
    "args": "!has(self.args) || size(self.args) == 0",
    "unsafeArgs": "!has(self.unsafeArgs) || size(self.unsafeArgs) == 0",
    "podTemplate": "!has(self.podTemplate)",
    "autoscaling": "!has(self.autoscaling)",
}
"""In CEL: the field has its default. The API server adds defaults before it evaluates a rule."""
_QUANTITIES: Final = {"kvMemory": "kv_memory", "hostTier": "host_tier", "resources": "resources"}
"""Attribute by field."""


def _unset(attribute: str) -> Callable[[EngineSpec], Violation | None]:
    default = EngineSpec.model_fields[attribute].default

    def check(engine: EngineSpec) -> Violation | None:
        if engine.url is None or getattr(engine, attribute) == default:
            return None
        return Violation(_PROBLEM, _FIX)

    return check


_MAX_COLOCATED_NAMES: Final = 44
"""Characters of the names of a RagCache and of an engine group together. Kubernetes labels the pods
of a StatefulSet with its name and a hash, in at most 63 characters."""


def _colocated_names_are_short(cache: RagCache) -> Violation | None:
    longest = max(len(engine.name) for engine in cache.spec.engines)
    limit = _MAX_COLOCATED_NAMES - longest
    if cache.spec.cache_store.placement == "separate" or len(cache.metadata.name) <= limit:
        return None
    return Violation(
        f"is longer than {limit} characters, and shards beside engines have longer names",
        "shorten it or the names of engines, or use placement separate",
    )


COLOCATION_RULES: tuple[Rule, ...] = (
    cel_rule(
        CacheStoreSpec,
        "shards",
        "self.placement == 'separate' || self.shards == 1",
        "is set, but with placement colocated each engine has one shard",
        "leave it out, or use placement separate",
    ),
    cel_rule(
        CacheStoreSpec,
        "podTemplate",
        "self.placement == 'separate' || !has(self.podTemplate)",
        "is set, but with placement colocated the shards are in the pods of the engines",
        "use podTemplate of the engines, or placement separate",
    ),
    cel_rule(
        RagCacheSpec,
        "cacheStore.placement",
        "self.cacheStore.placement == 'separate' || self.engines.exists(engine, !has(engine.url))",
        "is colocated, but RagCache runs no engine",
        "add a group of engines without url, or use placement separate",
    ),
    cel_rule(
        RagCacheSpec,
        "cacheStore.placement",
        "self.cacheStore.placement == 'separate' || "
        "!self.engines.exists(engine, has(engine.autoscaling))",
        "is colocated, but engines have autoscaling, which would move variants with each change",
        "leave out autoscaling and set replicas, or use placement separate",
    ),
    Rule(RagCache, "metadata.name", _colocated_names_are_short, NO_CEL_FOR_METADATA),
)


EXTERNAL_ENGINE_RULES: tuple[Rule, ...] = (
    cel_rule(
        EngineSpec,
        "gpu",
        "!has(self.gpu) || self.device == 'cuda'",
        "is set, but the engine computes on a processor",
        "leave it out, or set device to cuda",
    ),
    *(
        cel_rule(
            EngineSpec,
            field,
            f"has(self.url) || !has(self.{field})",
            "is set without url, and RagCache's own engines need none",
            "leave it out, or set url",
        )
        for field in ("keySecret", "servedName")
    ),
    *(
        cel_rule(EngineSpec, field, f"!has(self.url) || {condition}", _PROBLEM, _FIX)
        for field, condition in _CONDITIONS.items()
    ),
    *(
        Rule(EngineSpec, field, _unset(attribute), NO_CEL_FOR_QUANTITIES)
        for field, attribute in _QUANTITIES.items()
    ),
)


RETRIEVER_RULES: tuple[Rule, ...] = (
    cel_rule(
        EmbedderSpec,
        "model",
        "self.source.startsWith('http') || !has(self.model)",
        "is set, but only an endpoint has more than one model",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        EmbedderSpec,
        "model",
        "!self.source.startsWith('http') || has(self.model)",
        "is missing: an endpoint serves many models",
        "name one of them",
    ),
    cel_rule(
        EmbedderSpec,
        "keySecret",
        "self.source.startsWith('http') || !has(self.keySecret)",
        "is set, but only an endpoint takes a key",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        RerankerSpec,
        "model",
        "self.source == 'none' || has(self.model)",
        "is missing: cross-encoder and a URL need a model",
        "name one",
    ),
    cel_rule(
        RerankerSpec,
        "model",
        "self.source != 'none' || !has(self.model)",
        "is set, but the source none has no model",
        "leave it out, or set source to cross-encoder or the URL of an endpoint",
    ),
    cel_rule(
        RerankerSpec,
        "model",
        f"self.source != '{CROSS_ENCODER}' || !has(self.model) || "
        f"self.model.matches(r'^(?:{CROSS_ENCODER_MODEL})$')",
        "names no cross-encoder",
        "use ORGANISATION/NAME of the hub, pvc:CLAIM/FOLDER or path:FOLDER",
    ),
    cel_rule(
        RerankerSpec,
        "keySecret",
        "self.source.startsWith('http') || !has(self.keySecret)",
        "is set, but only an endpoint needs a key",
        "leave it out, or set source to the URL of an endpoint",
    ),
    cel_rule(
        RetrieverSpec,
        "gpu",
        "!has(self.gpu) || !has(self.embedder) || !self.embedder.source.startsWith('http') || "
        f"(has(self.reranker) && self.reranker.source == '{CROSS_ENCODER}')",
        "is set, but no model runs in the retriever",
        "leave it out, or use an embedder or a cross-encoder in the retriever",
    ),
    cel_rule(
        BackendSpec,
        "milvus",
        "!has(self.postgres) || !has(self.milvus)",
        "is set together with postgres",
        "keep the one that has your documents",
    ),
    cel_rule(
        RetrieverSpec,
        "replicas",
        "self.replicas == 1 || (has(self.backend) && has(self.backend.postgres))",
        "is above 1, but the documents are on the volume of one pod",
        "use 1, or set backend.postgres",
    ),
    cel_rule(
        RetrieverSpec,
        "index",
        "!has(self.index) || self.index.precision == 'float32' || !has(self.backend) || "
        "(!has(self.backend.postgres) && !has(self.backend.milvus))",
        "has a precision that postgres and milvus do not use",
        "leave out precision, or use the embedded backend",
    ),
)


def _shares_fit(spec: PrecisionSpec) -> Violation | None:
    *hotter, last = (grade.share for grade in spec.grades)
    if spec.scheme == "score":
        if {*hotter, last} == {None}:
            return None
        return Violation("have shares, which only scheme harag uses", "leave out share")
    if None in hotter or last is not None:
        return Violation(
            "need a share each, except for the last one, which gets the rest",
            "set share in all grades but the last one",
        )
    total = sum(share for share in hotter if share is not None)
    if total < 1:
        return None
    return Violation(
        f"have shares of {total:g} in all, which leave no variant to the last one",
        "use smaller shares, like 0.1",
    )


_LOSSY_GRADE: Final = " || ".join(
    f"!(one.{part} in ['native', 'packed'])" for part in ("key", "value")
)

PRECISION_RULES: Final[tuple[Rule, ...]] = (
    Rule(PrecisionSpec, "grades", _shares_fit, NO_CEL_FOR_ITEMS),
    cel_rule(
        PrecisionSpec,
        "maxError",
        "!has(self.maxError) || self.scheme == 'score'",
        "is set, but only scheme score uses it",
        "leave it out, or set scheme to score",
    ),
    cel_rule(
        RagCacheSpec,
        "cacheStore.precision.grades",
        "(self.reuse.mode == 'blend' && has(self.reuse.quality))"
        f" || !self.cacheStore.precision.grades.exists(one, {_LOSSY_GRADE})",
        "have a lossy codec, which needs reuse.mode blend and a target in reuse.quality",
        "set both, or use the codecs native and packed",
    ),
    # Shards do not know which model's report has passed.
    cel_rule(
        RagCacheSpec,
        "cacheStore.precision.grades",
        "!self.engines.exists(engine, has(engine.model))"
        f" || !self.cacheStore.precision.grades.exists(one, {_LOSSY_GRADE})",
        "have a lossy codec, which serves one model only, and engines have models of their own",
        "use the codecs native and packed, or a RagCache for each model",
    ),
)


CONSISTENCY: tuple[Rule, ...] = (
    cel_rule(
        ModelSpec,
        "cache.claim",
        "!has(self.cache) || !(self.source + '/').startsWith('pvc:' + self.cache.claim + '/')",
        "is the claim of source, which pods mount read-only",
        "use another claim, or leave out cache: such a model is not downloaded",
    ),
    cel_rule(
        ChunkingSpec,
        "overlap",
        "2 * self.overlap < self.size",
        "is not less than half of size",
        "use about an eighth of the size",
    ),
    cel_rule(
        ModelSpec,
        "maxLength",
        " && ".join(f"({condition})" for condition in _bundled_lengths()),
        "is above the context length of the bundled model",
        "use " + ", ".join(f"{limit} or less for {name}" for name, limit in BUNDLED_MODELS.items()),
    ),
    cel_rule(
        ModelSpec,
        "tokenSecret",
        "!has(self.tokenSecret) || self.source.startsWith('hf:')",
        "is set, but only an hf: source needs a token",
        "leave it out, or set source to hf:ORGANISATION/NAME",
    ),
    cel_rule(
        GatewaySpec,
        "httpRoute",
        "!has(self.ingress) || !has(self.httpRoute)",
        "is set together with ingress",
        "keep the one that your cluster supports",
    ),
    cel_rule(
        GatewaySpec,
        "tls",
        "!has(self.tls) || !(has(self.ingress) || has(self.httpRoute))",
        "is set together with ingress or httpRoute, whose controllers send plain HTTP",
        "keep one of them, and expose the gateway with service or a TLSRoute of your own",
    ),
    cel_rule(
        GatewaySpec,
        "adminPort",
        "self.adminPort != self.port",
        "is the gateway's port, too",
        "use another port",
    ),
    cel_rule(
        GatewayAuthSpec,
        "secretRef",
        "!has(self.secretRef) || self.enabled == true",
        "is set, but enabled is false",
        "leave it out, or set enabled to true",
    ),
    cel_rule(
        GatewaySpec,
        "oidc",
        "!has(self.oidc) || size(self.oidc) == 0 || !has(self.auth) || self.auth.enabled == true",
        "is set, but requests need no key (auth.enabled is false)",
        "leave it out, or set auth.enabled to true",
    ),
    Rule(GatewaySpec, "oidc", _issuer_names_differ, ENFORCED_BY_SCHEMA),
    Rule(GatewaySpec, "oidc", _issuers_differ, NO_CEL_FOR_ITEMS),
    cel_rule(
        OidcIssuerSpec,
        "tenants",
        "!has(self.tenants) || size(self.tenants) == 0 || has(self.tenantClaim)",
        "is set without tenantClaim",
        "name the claim that has the tenant",
    ),
    cel_rule(
        OidcIssuerSpec,
        "scopes",
        "(has(self.defaultScopes) && size(self.defaultScopes) > 0) || (has(self.scopes) && ("
        + " || ".join(f"(has(self.scopes.{one}) && size(self.scopes.{one}) > 0)" for one in Scope)
        + "))",
        "gives no scope, so that tokens of this issuer may do nothing",
        "set scopes.ask, for example",
    ),
    _max_replicas(GatewaySpec),
    _max_replicas(EngineSpec),
    *COLOCATION_RULES,
    *EXTERNAL_ENGINE_RULES,
    *RETRIEVER_RULES,
    Rule(ResourcesSpec, "cpuLimit", _cpu_limit_at_least_request, NO_CEL_FOR_QUANTITIES),
    Rule(
        ResourcesSpec,
        "memoryLimit",
        _memory_limit_at_least_request,
        NO_CEL_FOR_QUANTITIES,
    ),
    cel_rule(
        CacheStoreSpec,
        "admission",
        "!has(self.admission) || self.admission != 'score' || self.policy == 'score'",
        "score requires policy score, and policy is another one",
        "use policy score, or admission always or secondTouch",
    ),
    *PRECISION_RULES,
    Rule(
        CacheStoreSpec,
        "memory",
        _memory_holds_transfers,
        NO_CEL_FOR_QUANTITIES,
    ),
    Rule(RagCacheSpec, "engines", _engine_names_differ, ENFORCED_BY_SCHEMA),
    Rule(RagCacheSpec, "engines", _first_model_has_engines, NO_CEL_FOR_NAMES),
    Rule(RagCacheSpec, "engines", _same_name_is_same_model, NO_CEL_FOR_NAMES),
    Rule(RagCacheSpec, "engines", _same_model_same_ranks, NO_CEL_FOR_NAMES),
    Rule(RagCacheSpec, "engines", _ranks_have_heads, NO_CEL_FOR_NAMES),
    Rule(EngineSpec, "resources.cpuLimit", _ranks_have_cores, NO_CEL_FOR_QUANTITIES),
    Rule(EngineSpec, "gpu.sharedMemory", _shared_memory_holds_ranks, NO_CEL_FOR_QUANTITIES),
    Rule(RagCacheSpec, "engines", _tokens_are_equal, NO_CEL_FOR_NAMES),
    *(
        cel_rule(
            RagCacheSpec,
            "engines",
            f"self.engines.exists(engine, engine.role != '{other}')",
            f"have no group that can {role}",
            f"add one with role {role} or both",
        )
        for role, other in (("prefill", "decode"), ("decode", "prefill"))
    ),
    Rule(PodTemplateSpec, "imagePullSecrets", _pull_secrets_differ, ENFORCED_BY_SCHEMA),
    Rule(RagCacheSpec, "env", _variables_differ, ENFORCED_BY_SCHEMA),
    Rule(EnvSourceSpec, "", _is_one_value_source, ENFORCED_BY_SCHEMA),
    cel_rule(
        EnvVarSpec,
        "name",
        "!self.name.startsWith('RAGCACHE_') && !self.name.startsWith('ragcache_')"
        " && self.name != 'POD_NAME'",
        "is set by other fields of the RagCache",
        "use those fields, or another name",
    ),
    cel_rule(
        EnvVarSpec,
        "valueFrom",
        "!has(self.valueFrom) || !has(self.value)",
        "is set together with value",
        "leave one of them out",
    ),
    cel_rule(
        GatewayServiceSpec,
        "loadBalancerClass",
        "self.type == 'LoadBalancer' || !has(self.loadBalancerClass)",
        "is set, and type is not LoadBalancer",
        "leave it out, or use type LoadBalancer",
    ),
    cel_rule(
        GatewayServiceSpec,
        "loadBalancerSourceRanges",
        "self.type == 'LoadBalancer' || !has(self.loadBalancerSourceRanges) || "
        "size(self.loadBalancerSourceRanges) == 0",
        "is set, and type is not LoadBalancer",
        "leave it out and set spec.networkPolicy.clients, or use type LoadBalancer",
    ),
    Rule(HTTPRouteSpec, "hostnames", _hostnames_differ, ENFORCED_BY_SCHEMA),
    Rule(
        GatewayServiceSpec,
        "loadBalancerSourceRanges",
        _ranges_differ,
        ENFORCED_BY_SCHEMA,
    ),
    cel_rule(
        LabelRequirement,
        "values",
        "(self.operator == 'In' || self.operator == 'NotIn') == "
        "(has(self.values) && size(self.values) > 0)",
        "do not fit the operator",
        "list at least one for In and NotIn, none for Exists and DoesNotExist",
    ),
    Rule(ClientSpec, "", _selects_something, ENFORCED_BY_SCHEMA),
    cel_rule(
        TolerationSpec,
        "key",
        "has(self.key) || self.operator == 'Exists'",
        "is missing, and operator is not Exists",
        "name the taint's key",
    ),
    cel_rule(
        TolerationSpec,
        "value",
        "self.operator == 'Equal' || !has(self.value) || self.value == ''",
        "is set, but operator Exists ignores it",
        "leave it out, or use Equal",
    ),
    cel_rule(
        TolerationSpec,
        "tolerationSeconds",
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        "is set, but effect is not NoExecute",
        "leave it out, or use NoExecute",
    ),
    cel_rule(
        SyncSpec,
        "interval",
        f"duration(self.interval) >= duration('{MIN_INTERVAL_S}s') && "
        f"duration(self.interval) <= duration('{MAX_INTERVAL_S}s')",
        "is out of range",
        "use 10s to 24h",
    ),
    *ENGINE_ARGUMENT_RULES,
    Rule(SourceSpec, "", _is_one_source, ENFORCED_BY_SCHEMA),
)
