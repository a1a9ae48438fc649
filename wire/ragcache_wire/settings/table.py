"""The base class of the settings tables.

A field is a row of the table: ``RAGCACHE_`` and its name is the environment variable, the string
below it is its description. ``setting`` says which field of the RagCache sets it, or why none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ragcache_core.errors import InvalidInput

PREFIX: Final = "RAGCACHE_"


@dataclass(frozen=True, slots=True)
class Accepts:
    """What a setting accepts, in words: for error messages and for the reference page."""

    values: str


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One row of a table, as the reference page and the operator use it.

    ``default`` is None for a required setting and empty for an optional one without a value.
    Exactly one of ``spec`` and ``internal`` is set in a row that is complete.
    """

    field: str
    variable: str
    accepts: str
    default: str | None
    spec: str | None
    internal: str | None
    description: str


def setting(
    default: Any = ..., *, spec: str | None = None, internal: str | None = None, **options: Any
) -> Any:
    """Return the field of one setting.

    Args:
        spec: Path of the field of the RagCache that sets it, as ``spec.cacheStore.memory``.
        internal: Why no field of the RagCache sets it.
        options: Further arguments of ``pydantic.Field``.
    """
    return Field(default, json_schema_extra={"spec": spec, "internal": internal}, **options)


def variable(field: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + field.upper()


class ServiceSettings(BaseSettings):
    """Settings of one service, read from the environment once.

    A variable that is blank counts as not set, unless the setting is a choice. The constructor
    raises InvalidInput, which names the variable.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        enable_decoding=False,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )

    service: ClassVar[str]
    """Name of the service in the reference page."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._invalid_input(error.errors(include_url=False)[0]) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments of the constructor, then the environment, and no files."""
        return init_settings, env_settings

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, values: dict[str, Any]) -> dict[str, Any]:
        stripped = {
            name: value.strip() if isinstance(value, str) else value
            for name, value in values.items()
        }
        return {
            name: value
            for name, value in stripped.items()
            if value != "" or (name in cls.model_fields and _is_choice(cls.model_fields[name]))
        }

    @classmethod
    def _invalid_input(cls, details: ErrorDetails) -> InvalidInput:
        name = str(details["loc"][0])
        if name not in cls.model_fields:
            return InvalidInput(name, "is no setting", f"see {cls.__name__}")
        problem = "is not set" if details["type"] == "missing" else f"is {details['input']!r}"
        return InvalidInput(
            variable(name), problem, f"set it to {_accepts(cls.model_fields[name])}"
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, which are not validated."""
        unknown = changes.keys() - type(self).model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


def rows(table: type[ServiceSettings]) -> Iterator[SettingRow]:
    """Yield the rows of a table in their order."""
    for name, field in table.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"{table.__name__}.{name} is not made by setting()"
        spec, internal = extra["spec"], extra["internal"]
        yield SettingRow(
            field=name,
            variable=variable(name),
            accepts=_accepts(field),
            default=_default(field),
            spec=None if spec is None else str(spec),
            internal=None if internal is None else str(internal),
            description=" ".join((field.description or "").split()),
        )


def _default(field: FieldInfo) -> str | None:
    match field.default:
        case value if value is PydanticUndefined:
            return None
        case None:
            return ""
        case ():
            return ""
        case bool(value):
            return "on" if value else "off"
        case float(value) if value.is_integer():
            return str(int(value))
        case value:
            return str(value)


def _accepts(field: FieldInfo) -> str:
    marks = [item for item in field.metadata if isinstance(item, Accepts)]
    return marks[0].values if marks else _accepts_type(field.annotation)


def _accepts_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        *most, last = map(str, get_args(annotation))
        return f"{', '.join(most)} or {last}" if most else last
    for argument in get_args(annotation):
        if isinstance(argument, Accepts):
            return argument.values
    for argument in get_args(annotation):
        if argument is not type(None):
            return _accepts_type(argument)
    return "a text"


def _is_choice(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is Literal
