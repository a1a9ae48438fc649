"""Filters of searches in the REST API, in the shape that Qdrant uses.

A filter has lists of conditions: all of ``must``, at least one of ``should`` and none of
``must_not``. A condition tests one field of a document, or is a filter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ragcache_core.errors import InvalidInput
from ragcache_core.retrieval.filters import (
    MAX_DEPTH,
    And,
    Exists,
    FieldTest,
    Filter,
    In,
    InPeriod,
    InRange,
    Not,
    Or,
    Prefix,
    check_size,
)
from ragcache_core.retrieval.metadata import end_of, instant_of, text_of
from ragcache_wire.rest_fields.fields import (
    Text,
    WholeText,
    at_least_one,
    exactly_one,
    union_by,
    validation_error,
)
from ragcache_wire.rest_fields.metadata import ScalarIn
from ragcache_wire.v1 import retriever_pb2 as pb

MAX_FIELD_CHARS = 256
_BOUNDS = ("gt", "gte", "lt", "lte")
_TESTS = ("match", "range", "prefix", "exists")
_LISTS = ("must", "should", "must_not")
_UPDATED = "updated_unix_ms"


class MatchIn(BaseModel):
    """The values that a field may have."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra=exactly_one("value", "any")
    )

    value: ScalarIn | None = Field(default=None, description="The only value.")
    any: list[ScalarIn] | None = Field(
        default=None, min_length=1, description="One of these values."
    )

    @model_validator(mode="after")
    def _check_one(self) -> MatchIn:
        if (self.value is None) == (self.any is None):
            raise validation_error("needs exactly one of value and any", "set one of them")
        return self

    def values(self) -> tuple[str, ...]:
        """Return the accepted values as metadata has them."""
        wanted = self.any if self.any is not None else [self.value]
        return tuple(text_of(one) for one in wanted if one is not None)


def _bound_tag(value: object) -> str | None:
    match value:
        case bool():
            return None
        case int() | float():
            return "~number"
        case str() if instant_of(value) is not None:
            return "~date"
    return None


Bound: TypeAlias = Annotated[
    Annotated[float, Field(allow_inf_nan=False, strict=True), Tag("~number")]
    | Annotated[str, Field(examples=["2024-02-20", "2024-02-20T10:00:00Z"]), Tag("~date")],
    union_by(_bound_tag, "a number, or an ISO date such as 2024-02-20 or 2024-02-20T10:00:00Z"),
]


class RangeIn(BaseModel):
    """Bounds of a value that is a number or an ISO date. Other values are outside.

    A date without a time is its whole day: gte begins with it, gt after it, lt ends before it, and
    lte with it. A time without a zone is in UTC.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra=at_least_one(*_BOUNDS))

    gt: Bound | None = None
    gte: Bound | None = None
    lt: Bound | None = None
    lte: Bound | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> RangeIn:
        kinds = {isinstance(bound, str) for bound in self._bounds().values()}
        if not kinds:
            raise validation_error("has no bound", "set gt, gte, lt or lte")
        if len(kinds) == 2:
            raise validation_error("has a number and a date", "set bounds of one kind")
        return self

    def _bounds(self) -> dict[str, float | str]:
        return self.model_dump(exclude_none=True)

    def to_filter(self, field: str) -> Filter:
        """Convert to a test of a field."""
        bounds = self._bounds()
        numbers = {name: one for name, one in bounds.items() if not isinstance(one, str)}
        if numbers:
            return InRange(field, **numbers)
        dates = {name: one for name, one in bounds.items() if isinstance(one, str)}
        starts = [instant_of(dates.get("gte", "")), end_of(dates.get("gt", ""))]
        ends = [instant_of(dates.get("lt", "")), end_of(dates.get("lte", ""))]
        start_us = max((one for one in starts if one is not None), default=None)
        end_us = min((one for one in ends if one is not None), default=None)
        if field == _UPDATED:
            return InRange(field, gte=_milliseconds(start_us), lt=_milliseconds(end_us))
        return InPeriod(field, start_us, end_us)


def _milliseconds(instant_us: int | None) -> float | None:
    return None if instant_us is None else instant_us / 1000


class ConditionIn(BaseModel):
    """A test of one field: of metadata, or ``id``, ``title`` and ``updated_unix_ms``."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=exactly_one(*_TESTS))

    key: Annotated[str, Field(min_length=1, max_length=MAX_FIELD_CHARS), WholeText]
    match: MatchIn | None = None
    range: RangeIn | None = None
    prefix: Text | None = Field(default=None, description="The beginning of the value.")
    exists: bool | None = Field(
        default=None, strict=True, description="Whether the document has the field."
    )

    @model_validator(mode="after")
    def _check_one(self) -> ConditionIn:
        if sum(getattr(self, test) is not None for test in _TESTS) != 1:
            raise validation_error(
                "needs exactly one test", "set one of match, range, prefix and exists"
            )
        return self

    def to_filter(self) -> Filter:
        """Convert to a test of the filter language."""
        if self.match is not None:
            return In(self.key, self.match.values())
        if self.range is not None:
            return self.range.to_filter(self.key)
        if self.prefix is not None:
            return Prefix(self.key, self.prefix)
        return Exists(self.key) if self.exists else Not(Exists(self.key))


def _tag(value: object) -> str:
    if isinstance(value, dict):
        return "~condition" if "key" in value else "~filter"
    return "~condition" if isinstance(value, ConditionIn) else "~filter"


Condition = Annotated[
    Annotated[ConditionIn, Tag("~condition")] | Annotated["FilterIn", Tag("~filter")],
    Discriminator(_tag),
]
Conditions = Annotated[list[Condition], Field(min_length=1)]


class FilterIn(BaseModel):
    """Which documents a search considers."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            **at_least_one(*_LISTS),
            "examples": [
                {
                    "must": [
                        {"key": "team", "match": {"any": ["core", "billing"]}},
                        {"key": "year", "range": {"gte": 2024}},
                        {"key": "date", "range": {"gte": "2024-01-01"}},
                    ],
                    "must_not": [{"key": "id", "prefix": "drafts/"}],
                }
            ],
        },
    )

    must: Conditions | None = Field(default=None, description="All of these are true.")
    should: Conditions | None = Field(default=None, description="At least one of these is true.")
    must_not: Conditions | None = Field(default=None, description="None of these is true.")

    @model_validator(mode="after")
    def _check_some(self) -> FilterIn:
        if all(getattr(self, name) is None for name in _LISTS):
            raise validation_error("has no condition", "set must, should or must_not")
        return self

    def to_filter(self) -> Filter:
        """Convert to the filter language."""
        parts = _converted(self.must)
        if self.should is not None:
            choices = _converted(self.should)
            parts.append(choices[0] if len(choices) == 1 else Or(tuple(choices)))
        parts += map(Not, _converted(self.must_not))
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def checked(self, field: str) -> Filter:
        """Convert to the filter language, and check the size.

        Args:
            field: Path of the filter in the request, for errors.

        Raises:
            InvalidInput: The filter is too large.
        """
        wanted = self.to_filter()
        try:
            check_size(wanted)
        except InvalidInput as error:
            raise InvalidInput(field, error.problem, error.fix) from error
        return wanted


def _check_depth(value: Any) -> Any:
    """Refuse deeply nested JSON before it is validated, which recurses."""
    level: list[Any] = [value]
    for _ in range(3 * MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return value
    raise validation_error("is nested too deeply", "flatten it")


FilterField = Annotated[FilterIn, BeforeValidator(_check_depth)]
"""A filter as a field of a request."""

_FILTER: Final[TypeAdapter[FilterIn]] = TypeAdapter(FilterField)


def read_filter(path: str, value: Any) -> Filter:
    """Read the filter of an API key, which is written as in a search.

    Args:
        path: Path of the filter, for errors.

    Raises:
        InvalidInput: It is no filter, or too large.
    """
    try:
        return _FILTER.validate_python(value).checked(path)
    except ValidationError as error:
        problem = str(error.errors(include_url=False, include_input=False)[0]["msg"])
        raise InvalidInput(path, problem, "write it as in a search") from None


def filter_message(wanted: Filter) -> pb.Filter:
    """Convert a filter to the retriever's message."""
    match wanted:
        case And(filters):
            return pb.Filter(all=pb.Filters(filters=map(filter_message, filters)))
        case Or(filters):
            return pb.Filter(any=pb.Filters(filters=map(filter_message, filters)))
        case Not(inner):
            return pb.Filter(none=filter_message(inner))
        case _:
            return pb.Filter(field=_field_message(wanted))


def _field_message(test: FieldTest) -> pb.FieldFilter:
    match test:
        case In(name, values):
            return pb.FieldFilter(name=name, one_of=pb.TextList(values=values))
        case InRange(name, gt, gte, lt, lte):
            return pb.FieldFilter(name=name, range=pb.Range(gt=gt, gte=gte, lt=lt, lte=lte))
        case InPeriod(name, start_us, end_us):
            period = pb.Period(start_us=start_us, end_us=end_us)
            return pb.FieldFilter(name=name, period=period)
        case Exists(name):
            return pb.FieldFilter(name=name, exists=True)
        case Prefix(name, prefix):
            return pb.FieldFilter(name=name, prefix=prefix)


def _converted(conditions: Sequence[ConditionIn | FilterIn] | None) -> list[Filter]:
    return [one.to_filter() for one in conditions or ()]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
