"""Make the layers of this release's images ahead of the tests that need them.

python -m tests.cluster.layers [--previous]: also those of the previous release, for the upgrade.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from harness.availability import Unavailable
from ragcache_core.errors import InvalidInput
from tests.cluster.releases import previous_release
from tools.images import IMAGES, make_images

_NICENESS = 10
"""The tests that run meanwhile come first."""


def main() -> None:
    """Make the layers; the tests that need the images report a failure."""
    os.nice(_NICENESS)
    try:
        make_images(IMAGES)
        if "--previous" not in sys.argv:
            return
        with tempfile.TemporaryDirectory() as folder:
            _version, checkout = previous_release(Path(folder))
            make_images(IMAGES, source=checkout)
    except (Unavailable, InvalidInput) as problem:
        print(f"layers were not made: {problem}")


if __name__ == "__main__":
    main()
