"""Observes a RagCache's pods and gateway, and writes its status."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Sequence
from typing import Final

from ragcache_operator.builders.keys import OPERATOR, ComponentKeys, uses_keys
from ragcache_operator.builders.metadata import component_of
from ragcache_operator.builders.placement import ClusterPlacement
from ragcache_operator.kube.api import Api, ApiError, write_status
from ragcache_operator.kube.resources import CLAIMS, NODES, Object
from ragcache_operator.reconcile.actions import is_owned
from ragcache_operator.reconcile.children import Children, Owner, owner_key
from ragcache_operator.reconcile.state import ReconcileState, backoff_s
from ragcache_operator.reconcile.volumes import VOLUMES_RESIZED, volume_condition
from ragcache_operator.spec.ragcache import RagCache
from ragcache_operator.status.component import component_states, is_ready, workload_states
from ragcache_operator.status.conditions import (
    BLEND_VERIFIED,
    DATA_TYPE_SUPPORTED,
    Condition,
    ConditionState,
    Observation,
    PostEvent,
    SelfTest,
    blend_verification,
    current_test,
    data_type_support,
    events_for,
    is_test_due,
    make_conditions,
    refused_conditions,
    self_test_of,
)
from ragcache_operator.status.gateway_client import (
    GatewayAccess,
    GatewayClient,
    reset_event,
    unreported_resets,
)
from ragcache_operator.status.gpus import (
    GPUS_AVAILABLE,
    awaited_resources,
    gpu_availability,
    gpu_capacity,
    gpu_waits,
)
from ragcache_operator.status.report import accepted_status, refused_status
from ragcache_operator.status.retriever_state import RetrieverState

PROGRESS_POLL_S: Final = 3.0
"""Interval of reading the startup progress of pods. No watch delivers it."""
USAGE_POLL_S: Final = 60.0
RETRIEVER_POLL_S: Final = 10.0
"""Interval of asking the retriever while it changes. Otherwise it is that of the cache usage."""
NODES_POLL_S: Final = 10.0
"""Interval of reading the capacity of nodes while a pod waits for a GPU. Nothing watches nodes."""
TEST_BACKOFF_S: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


class StatusReporter:
    """Writes the status of RagCaches, and runs their self-test."""

    def __init__(
        self, api: Api, children: Children, gateway_client: GatewayClient, keys: ComponentKeys
    ) -> None:
        self._api = api
        self._children = children
        self._gateway_client = gateway_client
        self._keys = keys

    async def refuse(self, body: Object, reason: str, message: str, post_event: PostEvent) -> None:
        """Report that the operator does not apply the spec. Running components stay unchanged."""
        generation = body["metadata"]["generation"]
        conditions = refused_conditions(reason, message, generation, _conditions(body), _now())
        await self._write(body, refused_status(body, conditions), post_event)

    async def report(
        self,
        body: Object,
        placement: ClusterPlacement,
        desired: Sequence[Object],
        accepted: ConditionState,
        state: ReconcileState,
        post_event: PostEvent,
    ) -> float | None:
        """Run the self-test if it is due, and write the status.

        Returns:
            The seconds until the next report; None if only a change requires one.
        """
        pods = self._children.list_for(owner_key(body), "Pod")
        progress = await self._startup_progress(owner_key(body), pods)
        slow = await self._slow_engines(pods, state)
        waits = gpu_waits(pods, await self._gpu_capacity(pods, state))
        components = component_states(desired, self._children.get, pods, progress, waits)
        generation = body["metadata"]["generation"]
        test = current_test(components, self_test_of(_conditions(body)), generation)
        cache = placement.cache
        key = self._keys.key(OPERATOR, placement.owner) if uses_keys(cache, placement) else None
        gateway = GatewayAccess(placement.admin_url, key)
        own = self._stateful_pods(owner_key(body), pods)
        running = [one for one in own if component_of(one) == "retriever"]
        retriever, ask_again_s = await self._retriever_state(gateway, running, state)

        async def write(test: SelfTest) -> None:
            before = _conditions(body)
            blend = _blend_verification(cache, state, before)
            refusals = {name: one.message for name, one in state.claim_refusals.items()}
            claims = self._children.list_for(owner_key(body), CLAIMS.kind)
            volumes = volume_condition(desired, claims, refusals, before)
            more = {
                BLEND_VERIFIED: blend,
                VOLUMES_RESIZED: volumes,
                DATA_TYPE_SUPPORTED: data_type_support(slow, before),
                GPUS_AVAILABLE: gpu_availability(desired, pods, waits),
            }
            found = Observation(generation, components, test, accepted, more)
            conditions = make_conditions(found, before, _now())
            workloads = workload_states(desired, self._children.get)
            status = accepted_status(
                placement, found, conditions, workloads, retriever, state.store_usage
            )
            await self._write(body, status, post_event)

        waits_s = [PROGRESS_POLL_S] if progress else []
        if waits:
            waits_s.append(max(0.0, state.next_nodes_s - time.monotonic()))
        if ask_again_s is not None:
            waits_s.append(ask_again_s)
        if is_test_due(components, test, generation):
            if time.monotonic() >= state.next_test_s:
                if test.passed is None:
                    message = f"sending a question to {gateway.url}"
                    await write(SelfTest(None, "Asking", message, generation))
                test = await self._run_self_test(gateway, cache, generation, state)
            if not test.passed or test.generation != generation:
                waits_s.append(max(0.0, state.next_test_s - time.monotonic()))
        if test.passed:
            await self._refresh_usage(gateway, _model_names(cache), state, post_event)
            waits_s.append(USAGE_POLL_S)
        await write(test)
        return min(waits_s, default=None)

    async def _run_self_test(
        self, gateway: GatewayAccess, cache: RagCache, generation: int, state: ReconcileState
    ) -> SelfTest:
        result = await self._gateway_client.self_test(gateway, _model_names(cache))
        if result.passed:
            state.test_failures, state.next_test_s = 0, 0.0
            return SelfTest(True, "Answered", result.message, generation)
        state.next_test_s = time.monotonic() + backoff_s(TEST_BACKOFF_S, state.test_failures)
        state.test_failures += 1
        return SelfTest(False, "SelfTestFailed", result.message, generation)

    async def _refresh_usage(
        self,
        gateway: GatewayAccess,
        models: Sequence[str],
        state: ReconcileState,
        post_event: PostEvent,
    ) -> None:
        if time.monotonic() >= state.next_usage_s:
            state.next_usage_s = time.monotonic() + USAGE_POLL_S
            usage = await self._gateway_client.store_usage(gateway)
            if usage is not None:
                state.store_usage = usage
                now_ms = time.time_ns() // 1_000_000
                for reset in unreported_resets(usage.resets, state.reported_resets, now_ms):
                    post_event(reset_event(reset))
                state.reported_resets |= frozenset(usage.resets)
            verdict = await self._gateway_client.blend_verdict(gateway, models)
            state.blend_verdict = verdict or state.blend_verdict

    async def _gpu_capacity(
        self, pods: Sequence[Object], state: ReconcileState
    ) -> dict[str, int] | None:
        """Return how many of the extended resources that pods wait for the nodes have, or None."""
        resources = awaited_resources(pods)
        if not resources:
            state.gpu_capacity, state.next_nodes_s = None, 0.0
        elif time.monotonic() >= state.next_nodes_s or (
            state.gpu_capacity is not None and not resources <= state.gpu_capacity.keys()
        ):
            state.next_nodes_s = time.monotonic() + NODES_POLL_S
            state.gpu_capacity = await read_gpu_capacity(self._api, resources)
        return state.gpu_capacity

    async def _startup_progress(self, owner: Owner, pods: Sequence[Object]) -> dict[str, str]:
        """Return the startup progress of pods that run but are not ready, by pod name.

        Only pods of StatefulSets have a health port.
        """
        addresses = {
            pod["metadata"]["name"]: address
            for pod in self._stateful_pods(owner, pods)
            if not is_ready(pod) and (address := port_address(pod, "health")) is not None
        }
        answers = await asyncio.gather(
            *map(self._gateway_client.startup_progress, addresses.values())
        )
        return {name: text or "" for name, text in zip(addresses, answers, strict=True)}

    async def _retriever_state(
        self, gateway: GatewayAccess, pods: Sequence[Object], state: ReconcileState
    ) -> tuple[RetrieverState, float | None]:
        """Return the state of the retriever, and the seconds until it should be asked again.

        A gateway is asked, because the retriever answers only callers with the platform's key. The
        operator can read no Secret.
        """
        if not any(port_address(pod, "grpc") for pod in pods):
            # A pod that starts is a change, which causes a report.
            return RetrieverState(), None
        if time.monotonic() >= state.next_retriever_s:
            state.next_retriever_s = time.monotonic() + RETRIEVER_POLL_S
            state.retriever = await self._gateway_client.retriever_state(gateway)
        if state.retriever.is_settled and all(map(is_ready, pods)):
            return state.retriever, USAGE_POLL_S
        return state.retriever, max(0.0, state.next_retriever_s - time.monotonic())

    async def _slow_engines(self, pods: Sequence[Object], state: ReconcileState) -> dict[str, str]:
        """Return the data type of engines that compute it slowly, by pod name.

        Each ready engine is asked until it has answered once, because a pod keeps its processor.
        """
        engines = [pod for pod in pods if component_of(pod) == "engine" and is_ready(pod)]
        by_uid = {pod["metadata"]["uid"]: pod for pod in engines}
        state.slow_types = {uid: one for uid, one in state.slow_types.items() if uid in by_uid}
        unknown = {
            uid: f"{_engine_scheme(pod)}://{address}"
            for uid, pod in by_uid.items()
            if uid not in state.slow_types and (address := port_address(pod, "http")) is not None
        }
        answers = await asyncio.gather(
            *map(self._gateway_client.slow_number_type, unknown.values())
        )
        for uid, answer in zip(unknown, answers, strict=True):
            if answer is not None:
                state.slow_types[uid] = answer
        found = {by_uid[uid]["metadata"]["name"]: one for uid, one in state.slow_types.items()}
        return {name: one for name, one in found.items() if one}

    def _stateful_pods(self, owner: Owner, pods: Sequence[Object]) -> list[Object]:
        """Return the pods of our own StatefulSets.

        Any client can put the platform's labels on a pod, so only these pods are asked.
        """
        sets = {obj["metadata"]["uid"] for obj in self._children.list_for(owner, "StatefulSet")}
        return [pod for pod in pods if any(is_owned(pod, uid) for uid in sets)]

    async def _write(self, body: Object, status: Object, post_event: PostEvent) -> None:
        """Write the status if it changed, and post an Event for each changed condition."""
        before = _conditions(body)
        if await write_status(self._api, body, status):
            for event in events_for(before, status["conditions"]):
                post_event(event)


async def read_gpu_capacity(api: Api, resources: frozenset[str]) -> dict[str, int] | None:
    """Return how many of each extended resource the nodes have together.

    None if the operator may not list nodes, which the chart's values decide.
    """
    try:
        return gpu_capacity((await api.list(NODES)).items, resources)
    except ApiError:
        return None


def port_address(pod: Object, name: str) -> str | None:
    """Return "host:port" of a named port of a started pod, or None if it has none."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or ()
    if not status.get("podIP") or not all("running" in (c.get("state") or {}) for c in containers):
        return None
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or ():
            if port.get("name") == name:
                host = f"[{status['podIP']}]" if ":" in status["podIP"] else status["podIP"]
                return f"{host}:{port['containerPort']}"
    return None


def _blend_verification(
    cache: RagCache, state: ReconcileState, before: Sequence[Condition]
) -> ConditionState | None:
    if cache.spec.reuse.mode != "blend":
        return None
    has_target = cache.spec.reuse.quality is not None
    return blend_verification(state.blend_verdict, before, has_target=has_target)


def _conditions(body: Object) -> Sequence[Condition]:
    return (body.get("status") or {}).get("conditions") or ()


def _now() -> str:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return now.isoformat().replace("+00:00", "Z")


def _model_names(cache: RagCache) -> list[str]:
    return [model.served_name for model in cache.spec.models]


def _engine_scheme(pod: Object) -> str:
    """Return the scheme of an engine's HTTP port, which its probes use, too."""
    for container in pod["spec"]["containers"]:
        if any(port.get("name") == "http" for port in container.get("ports") or ()):
            return str(container["readinessProbe"]["httpGet"]["scheme"]).lower()
    return "http"
