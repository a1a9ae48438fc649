"""Environment variables of a container: plain values, and references to Secrets and to the pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from ragcache_operator.builders.metadata import Object
from ragcache_operator.spec.quantity import parse_quantity
from ragcache_operator.spec.ragcache import EngineSpec, RagCache
from ragcache_operator.spec.values import SecretKey
from ragcache_wire.settings.table import ServiceSettings, rows

_ENGINE = "spec.engines[]."


@dataclass(frozen=True, slots=True)
class FromSecret:
    """A value that the kubelet reads from a Secret. No object that the operator makes holds it."""

    name: str
    key: str

    @classmethod
    def of(cls, given: SecretKey) -> FromSecret:
        """Return the reference that a spec gives."""
        return cls(given.name, given.key)


@dataclass(frozen=True, slots=True)
class FromConfigMap:
    """A value that the kubelet reads from a ConfigMap of the user."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class FromField:
    """A value that the kubelet reads from the pod itself, by a path like ``metadata.name``."""

    path: str


@dataclass(frozen=True, slots=True)
class FromResource:
    """A value that the kubelet reads from the container's resources, like ``requests.memory``.

    Memory is in bytes.
    """

    name: str


EnvValue = str | FromSecret | FromConfigMap | FromField | FromResource


def settings_environment(
    table: type[ServiceSettings],
    cache: RagCache,
    engine: EngineSpec | None = None,
    **derived: EnvValue | None,
) -> dict[str, EnvValue]:
    """Return the environment of a service, built from its settings table.

    A setting with a ``spec`` path gets the value of that field of the RagCache. ``derived`` gives
    all other values, by the name of the setting, and replaces values of the RagCache. A value of
    None leaves its variable out.

    Args:
        engine: The group that paths below ``spec.engines[]`` refer to.

    Raises:
        ValueError: ``derived`` names no setting of the table.
    """
    unknown = derived.keys() - table.model_fields.keys()
    if unknown:
        raise ValueError(f"{table.__name__} has no setting {', '.join(sorted(unknown))}")
    environment: dict[str, EnvValue] = {}
    for row in rows(table):
        value: EnvValue | None = None
        if row.field in derived:
            value = derived[row.field]
        elif row.spec is not None:
            value = _as_variable(row.field, spec_value(row.spec, cache, engine))
        if value is not None:
            environment[row.variable] = value
    return environment


def spec_value(path: str, cache: RagCache, engine: EngineSpec | None = None) -> object:
    """Return the field of the RagCache at a path, or None below an object that is not set.

    Raises:
        LookupError: There is no such field.
    """
    value: object = cache
    if path.startswith(_ENGINE):
        value, path = engine, path.removeprefix(_ENGINE)
    for segment in path.split("."):
        if value is None:
            return None
        names = {to_camel(name): name for name in type(value).model_fields}  # type: ignore[attr-defined]
        value = getattr(value, names[segment])
    return value


def _as_variable(field: str, value: object) -> EnvValue | None:
    match value:
        case None:
            return None
        case bool():
            return "on" if value else "off"
        case SecretKey():
            return FromSecret.of(value)
        case str() if field.endswith("_bytes"):
            return str(parse_quantity(value))
        case str() | int() | float():
            return str(value)
    raise TypeError(f"{field}: a builder has to give the value for {value!r}")


def container_environment(values: Mapping[str, EnvValue]) -> list[Object]:
    """Return the variables as a container lists them, sorted by name.

    The kubelet expands ``$(NAME)`` in a value to a variable that is listed before it.
    """
    return [_variable(name, value) for name, value in sorted(values.items())]


def _variable(name: str, value: EnvValue) -> Object:
    if isinstance(value, FromSecret):
        reference = {"name": value.name, "key": value.key}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}
    if isinstance(value, FromConfigMap):
        reference = {"name": value.name, "key": value.key}
        return {"name": name, "valueFrom": {"configMapKeyRef": reference}}
    if isinstance(value, FromField):
        field = {"apiVersion": "v1", "fieldPath": value.path}
        return {"name": name, "valueFrom": {"fieldRef": field}}
    if isinstance(value, FromResource):
        resource = {"resource": value.name, "divisor": "1"}
        return {"name": name, "valueFrom": {"resourceFieldRef": resource}}
    # The API server drops an empty value.
    return {"name": name, **({"value": value} if value else {})}
