"""The ``restricted`` Pod Security Standard for Linux pods.

Written from the standard's text, for clusters that enforce nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

_VOLUMES = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
)
_SAFE_SYSCTLS = frozenset(
    {
        *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
        *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    }
)
_SECCOMP = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


def find_problems(pod: Object, annotations: Object | None = None) -> list[str]:
    """Return the violations of the ``restricted`` standard in a pod spec."""
    return [*_of_pod(pod), *_of_annotations(annotations or {}), *_of_containers(pod)]


def _of_pod(pod: Object) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is set"
    for volume in pod.get("volumes", ()):
        [source] = [field for field in volume if field != "name"]
        if source not in _VOLUMES:
            yield f"volume {volume['name']} is of type {source}"
    security = pod.get("securityContext", {})
    for sysctl in security.get("sysctls", ()):
        if sysctl["name"] not in _SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']} is unsafe"
    yield from _of_context(security, "the pod")


def _of_annotations(annotations: Object) -> Iterator[str]:
    for name, value in annotations.items():
        ours = name.startswith("container.apparmor.security.beta.kubernetes.io/")
        if ours and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"annotation {name} is {value}"


def _of_containers(pod: Object) -> Iterator[str]:
    above = pod.get("securityContext", {})
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod.get(kind, ()):
            name, own = container["name"], container.get("securityContext", {})
            yield from _of_container(container, name, own)
            if own.get("runAsNonRoot", above.get("runAsNonRoot")) is not True:
                yield f"{name} may run as root"
            seccomp = own.get("seccompProfile", above.get("seccompProfile", {}))
            if seccomp.get("type") not in _SECCOMP:
                yield f"{name} has no seccomp profile"


def _of_container(container: Object, name: str, own: Object) -> Iterator[str]:
    yield from _of_context(own, name)
    if own.get("privileged"):
        yield f"{name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{name} may escalate its privileges"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield f"{name} does not drop all capabilities"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield f"{name} adds capabilities"
    if own.get("procMount", "Default") != "Default":
        yield f"{name} sees more of /proc"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield f"{name} takes a port of its node"
    yield from _of_handlers(container, name)


def _of_handlers(container: Object, name: str) -> Iterator[str]:
    """Check that probes and hooks connect to no other host."""
    handlers = [container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")]
    handlers += container.get("lifecycle", {}).values()
    for handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            if handler.get(kind, {}).get("host"):
                yield f"{name} probes another host"


def _of_context(security: Object, whose: str) -> Iterator[str]:
    if security.get("runAsUser") == 0:
        yield f"{whose} runs as root"
    if security.get("runAsNonRoot") is False:
        yield f"{whose} may run as root"
    selinux = security.get("seLinuxOptions", {})
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.keys() & {"user", "role"}:
        yield f"{whose} has SELinux options of its own"
    if security.get("seccompProfile", {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{whose} is without seccomp"
    if security.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield f"{whose} is without AppArmor"
    if security.get("windowsOptions", {}).get("hostProcess"):
        yield f"{whose} is a host process"
