"""Check the families of models and print one JSON object.

::

    python -m tools.models --check [--only NAME ...] [--folder DIR]

Each family is a small model with random weights in a real vLLM on the CPU. It blends if it starts,
saves KV, loads it at another position, and answers at 100 % recomputed as after a full prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness import processes
from harness.engine_forks import EngineForks
from harness.processes import running_cachestore
from tools.models.check import BLEND, EXACT, FAILED, REFERENCE, REFUSED, Outcome, check_family
from tools.models.families import FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 if a family fails."""
    parser = argparse.ArgumentParser(prog="tools.models", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--folder", type=Path, help="keeps models and logs here")
    given = parser.parse_args(argv)
    with _folder(given.folder) as folder:
        found = {}
        with _forks(), running_cachestore(folder / "store") as store:
            for number, name in enumerate(given.only):
                found[name] = check_family(folder / str(number), FAMILIES[name], store)
                print(name, *found[name], file=sys.stderr, flush=True)
    print(json.dumps(summary(found)))
    return any(outcome.kind == FAILED for outcome in found.values())


def summary(found: dict[str, Outcome]) -> dict[str, object]:
    """Return the counts, and each family's outcome."""
    kinds = [outcome.kind for outcome in found.values()]
    return {
        "families_blend": kinds.count(BLEND),
        "families_exact": kinds.count(EXACT),
        "families_refused": kinds.count(REFUSED),
        "families_reference": kinds.count(REFERENCE),
        "families_failed": kinds.count(FAILED),
        "families": {name: outcome._asdict() for name, outcome in found.items()},
    }


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="models-") as made:
        yield Path(made)


@contextmanager
def _forks() -> Iterator[None]:
    """Import vLLM once for all engines."""
    forks = EngineForks()
    processes.engine_forks = forks
    try:
        yield
    finally:
        processes.engine_forks = None
        forks.close()


if __name__ == "__main__":
    sys.exit(main())
