"""What a spec sets about pods: their template, their environment and their proxy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from ragcache_operator.spec.values import (
    GROUP,
    HTTP_URL,
    Annotations,
    ForeignName,
    LabelKey,
    Labels,
    LabelValue,
    ManifestModel,
    ResourcesSpec,
    SecretEntry,
    ServerList,
    ServerSchema,
    StringPattern,
    validation_error,
)

_OWN_LABELS = ("app.kubernetes.io/", f"{GROUP}/")
_AffinityRules = Annotated[
    Mapping[str, Any],
    Field(max_length=2),
    ServerSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]


def _not_ours(key: str) -> str:
    if key.startswith(_OWN_LABELS):
        raise validation_error(
            f"{key!r} has a prefix of the operator's own labels",
            f"use a key that does not begin with {' or '.join(_OWN_LABELS)}",
        )
    return key


class TolerationSpec(ManifestModel):
    """TolerationSpec lets pods run on nodes with a matching taint."""

    key: LabelKey | None = None
    """Key of the taint. If unset, operator must be Exists, and the toleration matches every
    taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Equal matches a taint by key and value. Exists matches it by key."""
    value: LabelValue | None = None
    """Value of the taint. Only operator Equal uses it."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. If unset, the toleration matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """Seconds that a pod stays on a node with a NoExecute taint. If unset, it stays for ever."""


class PullSecret(ManifestModel):
    """PullSecret names a Secret with the credentials of an image registry."""

    name: ForeignName
    """Name of a Secret of type kubernetes.io/dockerconfigjson in the namespace of this object."""


class AffinitySpec(ManifestModel):
    """AffinitySpec is the affinity of a pod spec."""

    node_affinity: _AffinityRules | None = None
    """Nodes that the pods need or prefer."""
    pod_affinity: _AffinityRules | None = None
    """Pods that the pods have to be near, or prefer to be."""
    pod_anti_affinity: _AffinityRules | None = None
    """Pods that the pods must not be near, or avoid."""


class SpreadSpec(ManifestModel):
    """SpreadSpec spreads the pods of one workload over nodes, zones or other domains."""

    topology_key: LabelKey
    """Label of nodes whose values are the domains, like topology.kubernetes.io/zone."""
    max_skew: Annotated[int, Field(ge=1, le=64)] = 1
    """Largest difference between the numbers of pods in two domains."""
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    """What happens to a pod that would exceed maxSkew."""


_Id = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]


class SELinuxSpec(ManifestModel):
    """SELinuxSpec sets the SELinux context of pods."""

    level: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Level, like s0:c123,c456."""
    type: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Type, like container_t."""


class SecurityContextSpec(ManifestModel):
    """SecurityContextSpec sets the user and the groups of pods. Fields that are left out are left
    out of pods, too."""

    run_as_user: _Id | None = None
    """Id of the user. 0 is not allowed, because pods never run as root."""
    run_as_group: _Id | None = None
    """Id of the user's group."""
    fs_group: _Id | None = None
    """Id of the group that owns the volumes. Without it, the user must be able to write them."""
    supplemental_groups: Annotated[tuple[_Id, ...], ServerList(16)] = ()
    """Ids of further groups of the user."""
    se_linux_options: SELinuxSpec | None = None
    """SELinux context. If unset, the container runtime chooses one."""


class PodTemplateSpec(ManifestModel):
    """PodTemplateSpec adds to the pods that the operator makes. With every value of it, they meet
    the Pod Security Standard restricted."""

    labels: Annotated[
        Mapping[Annotated[LabelKey, AfterValidator(_not_ours)], LabelValue],
        Field(max_length=32),
        ServerSchema({"x-kubernetes-map-type": "atomic"}),
    ] = Field(default_factory=dict)
    """Labels of each pod, beside those of the operator."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of each pod."""
    service_account_annotations: Annotations = Field(default_factory=dict)
    """Annotations of the ServiceAccount of each workload, like the role of a cloud provider. Jobs
    of syncs run under the default ServiceAccount of the namespace."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must have to run the pods."""
    affinity: AffinitySpec | None = None
    """Affinity of each pod, as in a pod spec. The API server checks it with the pod."""
    tolerations: Annotated[tuple[TolerationSpec, ...], ServerList(32)] = ()
    """Tolerations of each pod."""
    topology_spread_constraints: Annotated[tuple[SpreadSpec, ...], ServerList(8)] | None = None
    """How the pods of each workload spread. If unset, they prefer different nodes and zones."""
    priority_class_name: ForeignName | None = None
    """Priority class of each pod. If unset, the cluster's default applies."""
    runtime_class_name: ForeignName | None = None
    """Runtime class of each pod, like gvisor. If unset, the cluster's default applies."""
    image_pull_secrets: Annotated[tuple[PullSecret, ...], ServerList(16, kind="map")] = ()
    """Secrets with the credentials of the image registry."""
    security_context: SecurityContextSpec | None = None
    """User and groups of each pod. If unset, all ids are 10001, and on OpenShift none is set. An
    empty value {} leaves all ids to the cluster, as OpenShift's policy restricted-v2 requires."""

    def overridden_by(self, other: PodTemplateSpec | None) -> PodTemplateSpec:
        """Return a copy with the fields that the other value gives, even if they are empty.

        Labels and annotations of both are merged.
        """
        if other is None:
            return self
        given = {name: getattr(other, name) for name in other.model_fields_set}
        for name in ("labels", "annotations", "service_account_annotations"):
            given[name] = {**getattr(self, name), **getattr(other, name)}
        return self.model_copy(update=given)


class KeyReference(ManifestModel):
    """KeyReference selects one entry of an object in the namespace of this object."""

    name: ForeignName
    """Name of the Secret or ConfigMap."""
    key: SecretEntry
    """Key in its data that holds the value."""


class EnvSourceSpec(ManifestModel):
    """EnvSourceSpec names where a value is. Exactly one of its fields must be set."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    secret_key_ref: KeyReference | None = None
    """Entry of a Secret. The operator never reads it."""
    config_map_key_ref: KeyReference | None = None
    """Entry of a ConfigMap."""


class EnvVarSpec(ManifestModel):
    """EnvVarSpec is one environment variable of every pod and Job."""

    name: Annotated[
        str,
        Field(max_length=253),
        StringPattern(r"[A-Za-z_][A-Za-z0-9_]*", "name of a variable", "write it like HF_ENDPOINT"),
    ]
    """Name of the variable. Those that begin with RAGCACHE_ are set by other fields."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Value of the variable."""
    value_from: EnvSourceSpec | None = None
    """Where the value is, in place of value."""


class TrustedCASpec(ManifestModel):
    """TrustedCASpec names certificate authorities that pods trust."""

    config_map: ForeignName
    """Name of a ConfigMap in the namespace of this object."""
    key: SecretEntry = "ca-bundle.crt"
    """Key in its data that holds the certificates in PEM format."""


ProxyUrl = Annotated[
    str,
    Field(max_length=2048),
    StringPattern(
        HTTP_URL,
        "URL of a proxy",
        "write it like http://proxy.example.com:3128; for one with a password set HTTPS_PROXY in "
        "spec.env from a Secret",
    ),
]


class ProxySpec(ManifestModel):
    """ProxySpec sets the proxy through which pods reach hosts outside the cluster."""

    http: ProxyUrl | None = None
    """Proxy for http URLs, like http://proxy.example.com:3128."""
    https: ProxyUrl | None = None
    """Proxy for https URLs, which usually begins with http:// itself."""
    no_proxy: Annotated[
        tuple[
            Annotated[
                str,
                Field(max_length=253),
                StringPattern(
                    r"[^\s,]+", "host", "write one host, like .example.com or 10.0.0.0/8"
                ),
            ],
            ...,
        ],
        ServerList(64),
    ] = ()
    """Further hosts that pods reach directly, like .example.com. Names inside the cluster are
    always among them."""


class SyncJobsSpec(ManifestModel):
    """SyncJobsSpec sets the Jobs that sync the RagCollections of this RagCache."""

    resources: ResourcesSpec = ResourcesSpec()
    """Resource requests and limits of each Job's pod. The default memory limit is 1Gi."""
    pod_template: PodTemplateSpec | None = None
    """Additions to each Job's pod, which override those of spec.podTemplate."""
