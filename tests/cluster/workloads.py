"""Small objects that try a cluster out: web servers of busybox, Services, claims."""

from __future__ import annotations

from typing import Any

from tests.cluster.containers import BUSYBOX_IMAGE

PORT = 8080
# Answers with its own name.
SERVE = "mkdir /tmp/www; hostname > /tmp/www/index.html; exec busybox httpd -f -p 8080 -h /tmp/www"


def deployment(name: str, replicas: int) -> dict[str, Any]:
    """Web servers, ready when they listen."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": _pod()},
        },
    }


def stateful_set(name: str, service: str, ready: bool) -> dict[str, Any]:
    """A web server that writes its claimed volume as a user that is not root.

    ready: without it, its probe never succeeds.
    """
    pod = _pod()
    pod["securityContext"] = {"runAsUser": 10001, "runAsNonRoot": True, "fsGroup": 10001}
    container = pod["containers"][0]
    container["command"][-1] = f"id > /data/owner && {SERVE}"
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    if not ready:
        container["readinessProbe"]["tcpSocket"]["port"] = PORT + 1
    claim = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "16Mi"}},
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "serviceName": service,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
            "volumeClaimTemplates": [claim],
        },
    }


def service(name: str, app: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "selector": {"app": app},
            "ports": [{"name": "http", "port": 80, "targetPort": PORT}],
            **spec,
        },
    }


def _pod() -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "server",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", SERVE],
                "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
            }
        ],
    }
