"""Evaluates the part of CEL that the rules use, so that a rule is written once.

The API server evaluates the same text. It is ``self`` with its fields, ``has``, ``size``,
``duration``, ``startsWith``, ``matches``, ``exists``, ``in``, comparisons, ``+``, ``*`` and the
logical operators.
Source: https://github.com/google/cel-spec.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from ragcache_operator.spec.collection import parse_duration

Value = Any
"""A JSON value, or the seconds of a duration."""
Evaluate = Callable[[Mapping[str, Any]], Value]
"""Evaluates an expression for the fields of ``self``. Raises KeyError for a missing field."""

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+)|r?'(?P<text>[^']*)'|(?P<name>[A-Za-z_]\w*)|(?P<symbol>"
    r"&&|\|\||==|!=|<=|>=|[<>+*!.,()\[\]]))"
)
_COMPARISONS: Final[Mapping[str, Callable[[Value, Value], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "in": lambda item, items: item in items,
}
_FUNCTIONS: Final[Mapping[str, Callable[[Value], Value]]] = {
    "size": len,
    "duration": parse_duration,
}
_LITERALS: Final[Mapping[str, Callable[[str], Value]]] = {"number": int, "text": str}
_CONSTANTS: Final = {"true": True, "false": False}


def _matches(text: str, pattern: str) -> bool:
    # In Python, $ also matches before a newline at the end.
    exact = pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern
    return re.search(exact, text, re.ASCII) is not None


_METHODS: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "startsWith": str.startswith,
    "matches": _matches,
}


def compile_cel(expression: str) -> Evaluate:
    """Parse an expression.

    Raises:
        ValueError: It is not in the supported part of CEL.
    """
    parser = _Parser(expression)
    try:
        found = parser.either()
        parser.expect("")
    except (IndexError, KeyError) as error:
        raise ValueError(f"{expression!r}: incomplete, or calls an unknown function") from error
    return found


class _Parser:
    """A recursive descent parser: one method for each level of precedence, lowest first."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = _tokens(expression)
        self._i = 0
        self._variables: set[str] = set()  # of the macros around the present position

    def expect(self, symbol: str) -> None:
        """Consume a symbol. Raises ValueError for another one."""
        if not self._accept(symbol):
            found = self._tokens[self._i][1] or "the end"
            raise ValueError(f"{self._expression!r}: expected {symbol or 'the end'}, found {found}")

    def either(self) -> Evaluate:
        """Parse ``a || b``."""
        first = self._both()
        if not self._accept("||"):
            return first
        second = self.either()
        return lambda fields: first(fields) or second(fields)

    def _both(self) -> Evaluate:
        first = self._comparison()
        if not self._accept("&&"):
            return first
        second = self._both()
        return lambda fields: first(fields) and second(fields)

    def _comparison(self) -> Evaluate:
        first = self._sum()
        for symbol, compare in _COMPARISONS.items():
            if self._accept(symbol):
                second = self._sum()
                return lambda fields: compare(first(fields), second(fields))
        return first

    def _sum(self) -> Evaluate:
        first = self._product()
        if not self._accept("+"):
            return first
        second = self._sum()
        return lambda fields: first(fields) + second(fields)

    def _product(self) -> Evaluate:
        first = self._unary()
        if not self._accept("*"):
            return first
        second = self._product()
        return lambda fields: first(fields) * second(fields)

    def _unary(self) -> Evaluate:
        if not self._accept("!"):
            return self._member()
        negated = self._unary()
        return lambda fields: not negated(fields)

    def _member(self) -> Evaluate:
        found = self._primary()
        while self._accept("."):
            found = self._field_or_method(found, self._name())
        return found

    def _field_or_method(self, of: Evaluate, name: str) -> Evaluate:
        if not self._accept("("):
            return lambda fields: of(fields)[name]
        if name == "exists":
            return self._exists(of)
        method, argument = _METHODS[name], self.either()
        self.expect(")")
        return lambda fields: method(of(fields), argument(fields))

    def _exists(self, of: Evaluate) -> Evaluate:
        """Parse the rest of ``items.exists(item, condition)``."""
        variable = self._name()
        self.expect(",")
        self._variables.add(variable)
        holds = self.either()
        self._variables.remove(variable)
        self.expect(")")
        return lambda fields: any(holds({**fields, f"${variable}": one}) for one in of(fields))

    def _primary(self) -> Evaluate:
        if self._accept("("):
            found = self.either()
            self.expect(")")
            return found
        if self._accept("["):
            return self._list()
        kind, text = self._next()
        if kind in _LITERALS or text in _CONSTANTS:
            value = _LITERALS[kind](text) if kind in _LITERALS else _CONSTANTS[text]
            return lambda _: value
        if text == "self":
            return lambda fields: fields
        if text in self._variables:
            return lambda fields: fields[f"${text}"]
        self.expect("(")
        found = self._has() if text == "has" else self._call(text)
        self.expect(")")
        return found

    def _list(self) -> Evaluate:
        items = [self.either()]
        while self._accept(","):
            items.append(self.either())
        self.expect("]")
        return lambda fields: [item(fields) for item in items]

    def _call(self, name: str) -> Evaluate:
        function, argument = _FUNCTIONS[name], self.either()
        return lambda fields: function(argument(fields))

    def _has(self) -> Evaluate:
        path = [self._name()]
        while self._accept("."):
            path.append(self._name())
        root, *parents, field = path
        if root in self._variables:
            parents.insert(0, f"${root}")

        def has(fields: Mapping[str, Any]) -> bool:
            for name in parents:
                fields = fields[name]
            return field in fields

        return has

    def _name(self) -> str:
        kind, text = self._next()
        if kind != "name":
            raise ValueError(f"{self._expression!r}: {text!r} is not a name")
        return text

    def _next(self) -> tuple[str, str]:
        self._i += 1
        return self._tokens[self._i - 1]

    def _accept(self, symbol: str) -> bool:
        kind, text = self._tokens[self._i]
        if text != symbol or kind in _LITERALS:
            return False
        self._i += 1
        return True


def _tokens(expression: str) -> list[tuple[str, str]]:
    """Return the kind and text of every token, and an end token without text."""
    found, position = [], 0
    while position < len(expression.rstrip()):
        match = _TOKEN.match(expression, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{expression!r}: not supported at {expression[position:]!r}")
        found.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return [*found, ("end", "")]
