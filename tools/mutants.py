"""Whether the tests still find the faults that they found at an earlier commit.

A mutant is one changed operator, number or condition in one function; a mutant that no test
notices has survived. The functions are those of `PACKAGES` whose code is the same in both
checkouts, so the same mutants (fixed seed) can be tried on both:

    python tools/mutants.py --tree ../before --same-in . --outcomes before.json
    python tools/mutants.py --tree . --same-in ../before --again before.json --outcomes after.json

Only tests that reach the changed function are run, the quickest first, and after an earlier run
the one that found the fault then. Needs cosmic-ray and coverage beside the test requirements.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import signal
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import coverage
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

PACKAGES = (
    "core/ragcache_core",
    "services/cachestore/ragcache_cachestore/state",
    "services/gateway/ragcache_gateway/planning",
)
TESTS = ("tests/unit/core", "tests/unit/cachestore", "tests/unit/gateway")
OPERATORS = tuple(
    f"core/{name}"
    for name in (
        "AddNot",
        "NumberReplacer",
        "ReplaceAndWithOr",
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceBinaryOperator_Div_Mul",
        "ReplaceBinaryOperator_Mul_Div",
        "ReplaceBinaryOperator_Sub_Add",
        "ReplaceBreakWithContinue",
        "ReplaceComparisonOperator_Eq_NotEq",
        "ReplaceComparisonOperator_GtE_Gt",
        "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_IsNot_Is",
        "ReplaceComparisonOperator_Is_IsNot",
        "ReplaceComparisonOperator_LtE_Lt",
        "ReplaceComparisonOperator_Lt_LtE",
        "ReplaceComparisonOperator_NotEq_Eq",
        "ReplaceContinueWithBreak",
        "ReplaceFalseWithTrue",
        "ReplaceOrWithAnd",
        "ReplaceTrueWithFalse",
        "ReplaceUnaryOperator_Delete_Not",
        "ZeroIterationForLoop",
    )
)
LIMIT_S = 120
"""A mutant whose tests need longer counts as found: it loops."""


@dataclass(frozen=True)
class Function:
    """A function of the product: its place in a file, lines from 1, both ends included."""

    path: Path
    first_line: int
    last_line: int
    source: str

    @property
    def lines(self) -> range:
        """The numbers of its lines."""
        return range(self.first_line, self.last_line + 1)


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place (from 0) in a function where an operator can be applied."""

    function: str
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the test that found it, None if it survived."""

    mutant: Mutant
    found_by: str | None


def functions(tree: Path) -> dict[str, Function]:
    """The functions of `PACKAGES` by qualified name; names that occur twice are left out."""
    found: dict[str, list[Function]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*.py")):
            text = path.read_text()
            lines = text.splitlines(keepends=True)
            for name, node in _definitions(ast.parse(text).body, ""):
                end = node.end_lineno or node.lineno
                source = "".join(lines[node.lineno - 1 : end])
                found[name].append(Function(path, node.lineno, end, source))
    return {name: same[0] for name, same in found.items() if len(same) == 1}


def _definitions(
    body: Sequence[ast.stmt], prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def mutated(function: Function, mutant: Mutant) -> str | None:
    """The source of the function's file with the mutant; None if there is no such place."""
    body = textwrap.dedent(function.source)
    indent = " " * (len(function.source) - len(function.source.lstrip(" ")))
    with contextlib.redirect_stdout(io.StringIO()):
        changed = mutate_code(body, get_operator(mutant.operator)(), mutant.occurrence)
    if changed is None:
        return None
    lines = function.path.read_text().splitlines(keepends=True)
    lines[function.first_line - 1 : function.last_line] = [textwrap.indent(changed, indent)]
    return "".join(lines)


def same_functions(tree: Path, other: Path) -> set[str]:
    """Return the names of functions whose code is the same in both checkouts."""
    mine, theirs = functions(tree), functions(other)
    return {name for name in mine.keys() & theirs if mine[name].source == theirs[name].source}


def sample(tree: Path, other: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of the functions whose code is the same in both checkouts."""
    here = functions(tree)
    possible = [
        Mutant(name, operator, occurrence)
        for name in sorted(same_functions(tree, other))
        for operator in OPERATORS
        for occurrence in _occurrences(here[name], operator)
    ]
    return random.Random(seed).sample(possible, min(count, len(possible)))


def _occurrences(function: Function, operator: str) -> Iterable[int]:
    occurrence = 0
    while (text := mutated(function, Mutant("", operator, occurrence))) is not None:
        if _code(text) != _code(function.path.read_text()):
            yield occurrence
        occurrence += 1


def _code(text: str) -> str | None:
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return None


class Reach:
    """A pytest plugin that records the lines that each test runs, and how long it takes."""

    def __init__(self, tree: Path) -> None:
        self._coverage = coverage.Coverage(
            data_file=None,
            config_file=False,
            include=[str(tree / package / "*") for package in PACKAGES],
        )
        self.seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test."""
        self._coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        if item.nodeid in self._failed:
            del self.seconds[item.nodeid]  # it would find every fault

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failure."""
        if report.failed:
            self._failed.add(report.nodeid)

    def measured(self) -> dict[str, list[list[int | str]]]:
        """Run the tests; for each file the pairs of line and test."""
        self._coverage.start()
        pytest.main(["-q", "-p", "no:cacheprovider", *_existing(TESTS)], plugins=[self])
        self._coverage.stop()
        data = self._coverage.get_data()
        return {
            path: [
                [line, test]
                for line, tests in data.contexts_by_lineno(path).items()
                for test in tests
                if test in self.seconds
            ]
            for path in data.measured_files()
        }


def _existing(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if Path(path).exists()]


class ChangedSource(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed source, everything else as usual."""

    def __init__(self, path: Path, source: str) -> None:
        self._path = path.resolve()
        self._code: CodeType = compile(source, str(path), "exec")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the changed module, and no other."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != self._path:
            return None
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=self,
            submodule_search_locations=spec.submodule_search_locations,
        )

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source."""
        exec(self._code, module.__dict__)


class FirstFailure:
    """A pytest plugin that keeps the name of the first test that fails."""

    name: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first failure."""
        if report.failed and self.name is None:
            self.name = report.nodeid


def found_by(path: Path, source: str, tests: Sequence[str]) -> str | None:
    """The first test that fails with the changed source, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGALRM, _too_slow(writer))
        signal.alarm(LIMIT_S)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        failure = FirstFailure()
        try:
            sys.meta_path.insert(0, ChangedSource(path, source))
            options = ["-x", "-q", "-n0", "-p", "no:cacheprovider"]
            status = pytest.main([*options, *tests], plugins=[failure])
            answer = "" if status == 0 else failure.name or "the start of the tests"
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer or None


def _too_slow(writer: int) -> Any:
    def end(number: int, frame: FrameType | None) -> None:
        os.write(writer, b"the time limit")
        os._exit(1)

    return end


def reach_of(tree: Path) -> tuple[dict[str, list[list[int | str]]], dict[str, float]]:
    """Which tests run which lines, measured in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        reach = Reach(tree)
        answer = json.dumps([reach.measured(), reach.seconds])
        with os.fdopen(writer, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines, seconds = json.load(pipe)
    os.waitpid(child, 0)
    return lines, seconds


def tried(tree: Path, mutants: Sequence[Mutant], killers: dict[Mutant, str]) -> Iterator[Outcome]:
    """Try each mutant that the checkout still has."""
    here = functions(tree)
    lines, seconds = reach_of(tree)
    for number, mutant in enumerate(mutants):
        function = here.get(mutant.function)
        source = mutated(function, mutant) if function else None
        if function is None or source is None:
            continue
        tests = {
            str(test) for line, test in lines.get(str(function.path), ()) if line in function.lines
        }
        in_order = sorted(tests, key=lambda test: (test != killers.get(mutant), seconds[test]))
        finder = found_by(function.path, source, in_order) if in_order else None
        print(f"{number + 1}/{len(mutants)} {mutant} {finder}", file=sys.stderr, flush=True)
        yield Outcome(mutant, finder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw or repeat mutants, and print how many the tests found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, required=True, help="the checkout to test")
    parser.add_argument("--same-in", type=Path, required=True, help="the other checkout")
    parser.add_argument("--again", type=Path, help="outcomes of an earlier run, to repeat it")
    parser.add_argument("--outcomes", type=Path, required=True, help="where to write outcomes")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    tree, other = given.tree.resolve(), given.same_in.resolve()
    earlier: list[Outcome] = []
    if given.again:
        stored = json.loads(given.again.read_text())
        earlier = [Outcome(Mutant(**one["mutant"]), one["found_by"]) for one in stored]
        same = same_functions(tree, other)
        mutants = [one.mutant for one in earlier if one.mutant.function in same]
    else:
        mutants = sample(tree, other, given.count, given.seed)
    killers = {one.mutant: one.found_by for one in earlier if one.found_by}
    outcomes_path = given.outcomes.resolve()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    outcomes = list(tried(tree, mutants, killers))
    outcomes_path.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    found = sum(one.found_by is not None for one in outcomes)
    lost = [asdict(one.mutant) for one in outcomes if one.mutant in killers and not one.found_by]
    figures = {"mutants": len(outcomes), "found": found, "score": round(found / len(outcomes), 3)}
    print(json.dumps({**figures, "lost": lost}))


if __name__ == "__main__":
    main()
