"""What every benchmark does alike: options, progress, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def options(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with ``--quick``, whose help is ``quick``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def is_quick(description: str | None, quick: str) -> bool:
    """Parse the command line of a benchmark that has no other option."""
    return bool(options(description, quick).parse_args().quick)


def say(text: str) -> None:
    """Write progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_figures(measure: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Measure in a temporary folder, print the figures as JSON, and return them."""
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder))
    print(json.dumps(figures))
    return figures


def rounded(figures: Mapping[str, float], digits: int = 4) -> dict[str, float]:
    return {name: round(figure, digits) for name, figure in figures.items()}


def median_ms(seconds: Iterable[float], digits: int = 1) -> float:
    return round(statistics.median(seconds) * 1e3, digits)
