"""Measure the code against the rules of the house, and print one JSON object.

::

    python -m tools.house [--check]

With ``--check`` the exit status is 1 if a figure is outside its bound.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ragcache_wire.settings import unmapped_settings
from tools.prose import ROOT, num_words, paragraphs, python_prose, repository_files, sentences

PRODUCT: Final = ("core", "wire", "kv", "operator", "services", "cli")
RETRIEVER: Final = "services/retriever"
MOST_ARGUMENTS: Final = 6
BOUNDS: Final = {
    "product_lines": 120_500,
    "retriever_lines": 16_400,
    "test_lines": 115_000,
    "bench_lines": 17_850,
    "tools_lines": 9_600,
    "modules": 680,
    "long_argument_lists": 0,
    "duplicate_class_names": 0,
    "import_cycles": 0,
    "architecture_lines": 176,
    "mean_sentence_words": 18,
    "settings_unmapped": 0,
}
_SHARED_NAMES: Final = {"Config", "Settings", "Metrics"}
_NO_MODULE: Final = {"__init__.py", "__main__.py"}
_FEWEST_WORDS: Final = 3


def module_name(path: Path) -> str:
    """The dotted name of a product module."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    while not parts[0].startswith("ragcache_"):
        parts.pop(0)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def num_lines(files: Iterable[Path]) -> int:
    """The lines of files, with comments and blank ones."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def python_files(*folders: str) -> list[Path]:
    """The Python files of folders, without generated code."""
    return [path for path in repository_files(folders) if path.suffix == ".py"]


def long_argument_lists(files: Iterable[Path]) -> list[str]:
    """The functions of the product with more than six parameters, ``self`` and ``cls`` aside.

    Kernels of Triton may have more: each constant of a kernel is an argument of its own.
    """
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                names = [
                    one.arg
                    for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                ]
                if len(names) - (names[:1] in (["self"], ["cls"])) > MOST_ARGUMENTS:
                    found.append(f"{module_name(path)}.{node.name}")
    return found


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(one) == "triton.jit" for one in node.decorator_list)


def duplicate_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """The class names that more than one module of the product defines, with these modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name not in _SHARED_NAMES:
                found[node.name].append(module_name(path))
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def imports(files: Iterable[Path]) -> dict[str, set[str]]:
    """The product modules that each module imports, also for type annotations alone."""
    sources = {module_name(path): path for path in files}
    graph: dict[str, set[str]] = {}
    for name, path in sources.items():
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (inner & sources.keys()) or {node.module}
        graph[name] = (found & sources.keys()) - {name}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def sentence_lengths(files: Iterable[Path]) -> list[int]:
    """Words of each sentence of Markdown and docstrings, without fragments of a word or two."""
    lengths: list[int] = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            prose = (text.words for text in paragraphs(source, markdown=True))
        elif path.suffix == ".py":
            found = python_prose(source, ast.parse(source))
            prose = (text.words for kind, text in found if kind == "docstring")
        else:
            continue
        counted = (num_words(sentence) for words in prose for sentence in sentences(words))
        lengths += [words for words in counted if words >= _FEWEST_WORDS]
    return lengths


def measure() -> dict[str, object]:
    """All figures, with the offenders of each beside it."""
    files = python_files(*PRODUCT)
    lists = long_argument_lists(files)
    duplicates = duplicate_classes(files)
    found_cycles = cycles(imports(files))
    lengths = sentence_lengths(repository_files())
    unmapped = unmapped_settings()
    return {
        "product_lines": num_lines(files),
        "retriever_lines": num_lines(python_files(RETRIEVER)),
        "test_lines": num_lines(python_files("tests", "harness")),
        "bench_lines": num_lines(python_files("bench")),
        "tools_lines": num_lines(python_files("tools")),
        "modules": sum(path.name not in _NO_MODULE for path in files),
        "long_argument_lists": len(lists),
        "duplicate_class_names": len(duplicates),
        "import_cycles": len(found_cycles),
        "architecture_lines": len((ROOT / "ARCHITECTURE.md").read_text().splitlines()),
        "mean_sentence_words": round(sum(lengths) / len(lengths), 1),
        "settings_unmapped": len(unmapped),
        "long_lists": lists,
        "duplicates": duplicates,
        "cycles": found_cycles,
        "unmapped": unmapped,
    }


def main() -> int:
    """Print the figures; with --check fail if one is out of bounds."""
    parser = argparse.ArgumentParser(description="Measure the code against the rules of the house.")
    parser.add_argument("--check", action="store_true", help="fail if a figure is out of bounds")
    given = parser.parse_args()
    figures = measure()
    print(json.dumps(figures))
    broken = {name: bound for name, bound in BOUNDS.items() if float(str(figures[name])) > bound}
    for name, bound in broken.items():
        print(f"house: {name} is {figures[name]}, at most {bound} is allowed", file=sys.stderr)
    return 1 if given.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
