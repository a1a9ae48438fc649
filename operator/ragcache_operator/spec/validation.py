"""Rules about the values of a model, and the function that checks them.

A rule is written once. If CEL can express it, ``cel_rule`` takes its CEL text, which the API server
and ``cel`` evaluate. Other rules are functions, with a reason why there is no CEL text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.cel import compile_cel

ENFORCED_BY_SCHEMA = "the OpenAPI schema enforces it"
NO_CEL_FOR_ITEMS = "the supported part of CEL compares no items of a list with each other"
NO_CEL_FOR_METADATA = "the schema of an object has no fields of its metadata"
NO_CEL_FOR_NAMES = "the name of a model may follow from its source"
NO_CEL_FOR_QUANTITIES = "the operator compares quantities, which it also derives defaults from"


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a value breaks a rule.

    ``subpath`` extends the rule's field, where only the value tells the exact path (``[2].name``).
    """

    problem: str
    fix: str
    subpath: str = ""


@dataclass(frozen=True, slots=True)
class CelRule:
    """The form of a rule that the API server evaluates.

    ``expression`` is true where the rule holds. ``message`` has the problem and the fix.
    """

    expression: str
    message: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule about the values of one model.

    Args:
        model: The model that the rule is about.
        field: Path of the invalid field below the value, as in a manifest. Empty for the value
            itself.
        check: Returns a Violation, or None where the rule holds.
        cel: The CEL form, or the reason why there is none.
    """

    model: type[BaseModel]
    field: str
    check: Callable[[Any], Violation | None]
    cel: CelRule | str


def cel_rule(model: type[BaseModel], field: str, expression: str, problem: str, fix: str) -> Rule:
    """Return a rule that is written in CEL.

    Args:
        expression: True where the rule holds. ``self`` is a value of ``model``, with the defaults
            of fields that a manifest leaves out.
        problem: What is wrong with the field.
        fix: What to do.
    """
    holds, violation = compile_cel(expression), Violation(problem, fix)

    def check(value: BaseModel) -> Violation | None:
        # As in CEL, a field without a value is missing.
        fields = value.model_dump(mode="json", by_alias=True, exclude_none=True)
        return None if holds(fields) else violation

    return Rule(model, field, check, CelRule(expression, f"{problem}; {fix}"))


def update_rule(
    model: type[BaseModel], field: str, expression: str, problem: str, fix: str
) -> Rule:
    """Return a rule about what an update may change, which compares ``self`` with ``oldSelf``.

    Only the API server has both values, so it holds for each single value.
    """
    return Rule(model, field, lambda _: None, CelRule(expression, f"{problem}; {fix}"))


def check_rules(rules: Sequence[Rule], value: BaseModel, path: str = "") -> list[InvalidInput]:
    """Return every violation of the rules in a value and in the models below it.

    Args:
        path: Path of the value itself.
    """
    found = []
    for model_path, model in walk_models(value, path):
        for rule in rules:
            if type(model) is rule.model and (violation := rule.check(model)) is not None:
                field = join_path(model_path, rule.field) + violation.subpath
                found.append(InvalidInput(field, violation.problem, violation.fix))
    return found


def walk_models(value: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Yield a model and every model below it, each with its path as in a manifest."""
    yield path, value
    for name, field in type(value).model_fields.items():
        child = getattr(value, name)
        child_path = join_path(path, field.alias or name)
        if isinstance(child, BaseModel):
            yield from walk_models(child, child_path)
        elif isinstance(child, tuple):
            for i, item in enumerate(child):
                if isinstance(item, BaseModel):
                    yield from walk_models(item, f"{child_path}[{i}]")


def join_path(path: str, field: str) -> str:
    """Join two field paths with a dot. Either of them may be empty."""
    return ".".join(piece for piece in (path, field) if piece)
