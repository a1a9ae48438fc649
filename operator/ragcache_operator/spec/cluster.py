"""Who may connect to the platform's pods in a cluster, and where they send telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ragcache_operator.spec.values import (
    HTTP_URL,
    ForeignName,
    LabelKey,
    Labels,
    LabelValue,
    ManifestModel,
    ServerList,
    ServerSchema,
    StringPattern,
)


class LabelRequirement(ManifestModel):
    """LabelRequirement is one condition on an object's labels."""

    key: LabelKey
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """Relation of the label's value to values."""
    values: Annotated[tuple[LabelValue, ...], ServerList(32)] = ()
    """Values of the label. In and NotIn need at least one, Exists and DoesNotExist take none."""


class LabelSelector(ManifestModel):
    """LabelSelector selects objects whose labels meet all conditions. An empty selector selects
    every object."""

    match_labels: Labels = Field(default_factory=dict)
    """Labels that a selected object has."""
    match_expressions: Annotated[tuple[LabelRequirement, ...], ServerList(32)] = ()
    """Further conditions on the labels of a selected object."""


class ClientSpec(ManifestModel):
    """ClientSpec selects pods that may connect. With both selectors, a pod must match both."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    namespace_selector: LabelSelector | None = None
    """Namespaces of the pods. If unset, only pods in the namespace of this object match."""
    pod_selector: LabelSelector | None = None
    """Labels of the pods. If unset, every pod in the selected namespaces matches."""


class NetworkPolicySpec(ManifestModel):
    """NetworkPolicySpec limits the network connections between pods."""

    enabled: bool = True
    """Whether the operator creates NetworkPolicies that allow only the connections that components
    need. The cluster's network plugin must enforce them."""
    clients: Annotated[tuple[ClientSpec, ...], ServerList(32)] = ()
    """Pods that may connect to the gateway's port. If empty, every client may connect."""
    admin_clients: Annotated[tuple[ClientSpec, ...], ServerList(32)] = ()
    """Pods that may connect to the gateway's adminPort. If empty, pods in the namespace of this
    object may connect. The operator always may."""
    metrics_from: Annotated[tuple[ClientSpec, ...], ServerList(32)] = ()
    """Pods that may connect to the ports with metrics and health, which serve nothing else. If
    empty, pods of all namespaces may that have the Prometheus Operator's label
    app.kubernetes.io/name: prometheus."""


class IssuerRef(ManifestModel):
    """IssuerRef names an issuer of cert-manager."""

    name: ForeignName
    """Name of the issuer."""
    kind: Literal["Issuer", "ClusterIssuer"] = "Issuer"
    """Kind of the issuer. An Issuer is in the namespace of this object."""


class TlsSpec(ManifestModel):
    """TlsSpec sets the encryption of the connections between the components."""

    enabled: bool = True
    """Whether gateway, retriever, shards and engines encrypt their connections with each other, and
    show each other certificates. The operator makes the certificates and renews them. A change
    restarts all pods, and until all have restarted the old ones cannot call the new ones."""
    issuer_ref: IssuerRef | None = None
    """Issuer of cert-manager that makes the certificates in place of the operator. It must be a
    certificate authority of your own, which puts its certificate into ca.crt of its Secrets. If the
    cluster has no cert-manager, the operator makes them."""


class OtlpSpec(ManifestModel):
    """OtlpSpec names an OpenTelemetry collector."""

    endpoint: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(HTTP_URL, "URL of a collector", "write it like http://collector:4318"),
    ]
    """Base URL of the collector, like http://collector:4318. Components send OTLP over HTTP to
    /v1/metrics and /v1/traces below it."""
    sample_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the traces that start in the gateway and are recorded, like 0.1. The gateway decides
    once for each trace, and the other components follow. A request with a trace context follows the
    decision of its caller instead."""


class PodMonitorSpec(ManifestModel):
    """PodMonitorSpec tells the Prometheus Operator to scrape every pod."""

    enabled: bool = True
    """Whether the operator creates a PodMonitor. It does so only in clusters that have the kind."""
    interval: Annotated[
        str,
        Field(max_length=6),
        StringPattern(r"[1-9][0-9]{0,4}(s|m)", "duration", "write it like 30s or 1m"),
    ] = "30s"
    """Scrape interval, like 30s."""
    labels: Annotated[
        Mapping[LabelKey, LabelValue],
        Field(max_length=16),
        ServerSchema({"x-kubernetes-map-type": "atomic"}),
    ] = {}
    """Labels of the PodMonitor. The podMonitorSelector of your Prometheus must match them."""


class TelemetrySpec(ManifestModel):
    """TelemetrySpec sets where components send metrics and traces, and who scrapes metrics."""

    otlp: OtlpSpec | None = None
    """The OpenTelemetry collector that receives metrics and spans. If unset, components export
    none."""
    logs: Literal["text", "json"] = "text"
    """Format of the logs of gateway, retriever and cache store: lines of text, or one JSON object
    in each line, with the trace's id."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that components log. For engines it is the level of vLLM's log. A change
    restarts all pods."""
    content: Literal["off", "on"] = "off"
    """Whether spans of gateway and retriever have the text of questions, answers and retrieved
    chunks. The collector must be trusted with all documents then."""
    pod_monitor: PodMonitorSpec = PodMonitorSpec()
    """PodMonitor of the Prometheus Operator for the metrics of all components."""
