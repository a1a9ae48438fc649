"""Environment variables of a container: plain values, and references to Secrets and to the pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ragcache_operator.builders.objects.ownership import Object
from ragcache_operator.spec import SecretKey


@dataclass(frozen=True, slots=True)
class FromSecret:
    """A value that the kubelet reads from a Secret; no object of ours ever holds it."""

    name: str
    key: str

    @classmethod
    def of(cls, given: SecretKey) -> FromSecret:
        """The reference that a spec gives."""
        return cls(given.name, given.key)


@dataclass(frozen=True, slots=True)
class FromField:
    """A value that the kubelet reads from the pod itself. path: like ``metadata.name``."""

    path: str


EnvValue = str | FromSecret | FromField


def environment(values: Mapping[str, EnvValue]) -> list[Object]:
    """Variables as a container lists them, by name; one may name those before it: ``$(NAME)``."""
    return [_variable(name, value) for name, value in sorted(values.items())]


def _variable(name: str, value: EnvValue) -> Object:
    if isinstance(value, FromSecret):
        reference = {"name": value.name, "key": value.key}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}
    if isinstance(value, FromField):
        field = {"apiVersion": "v1", "fieldPath": value.path}
        return {"name": name, "valueFrom": {"fieldRef": field}}
    return {"name": name, "value": value}
