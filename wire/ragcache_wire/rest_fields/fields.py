"""Types of fields in requests: texts, whole numbers, and rules on which fields are given.

A text is whole Unicode without NUL. Null means that a field is not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


def exactly_one(*names: str) -> dict[str, Any]:
    """Return the schema of objects that give one of these fields."""
    return {"oneOf": [_given(name) for name in names]}


def at_least_one(*names: str) -> dict[str, Any]:
    """Return the schema of objects that give some of these fields."""
    return {"anyOf": [_given(name) for name in names]}


def _given(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def to_integer(value: Any) -> Any:
    """Return a float without a fraction as an integer, and every other value as it is.

    JSON Schema counts 5.0 as an integer, and some clients write numbers like this.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGRAL: Final = BeforeValidator(to_integer)

MAX_COUNT: Final = 2**53 - 1
"""Largest whole number that every JSON parser reads exactly. Source: RFC 8259, section 6."""

Count = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True), INTEGRAL]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True), INTEGRAL]


def check_text(value: str) -> str:
    """Return the value if every part behind the gateway can take it.

    The prompt builder marks the position of the chunks with NUL, and no text document contains it.
    """
    if "\0" in value:
        raise validation_error("holds a NUL character", "send text, not binary data")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise validation_error("holds half of a surrogate pair", "send whole characters") from None
    return value


def union_by(tag_of: Callable[[object], str | None], wanted: str) -> Discriminator:
    """Return the discriminator of a union whose errors name the field alone.

    Args:
        tag_of: Returns the tag of a value's type, None for a wrong type.
        wanted: What to send instead of a wrong type.
    """
    return Discriminator(tag_of, "wrong_type", f"send {wanted}")


def validation_error(problem: str, fix: str) -> PydanticCustomError:
    """Make a validation error that says how to fix the value."""
    return PydanticCustomError("ragcache", "{problem}; {fix}", {"problem": problem, "fix": fix})


class WholeText:
    """The check of texts, and what of it JSON Schema can say."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(check_text, handler(source))

    @staticmethod
    def __get_pydantic_json_schema__(
        schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # An escape, because not every reader of the pattern takes the character itself.
        return {**handler(schema), "pattern": r"^[^\u0000]*$"}


Text = Annotated[str, WholeText]
NonEmptyText = Annotated[str, Field(min_length=1), WholeText]
