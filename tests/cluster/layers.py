"""Make the layers of this release's images and the last one's, for tests that come later.

python -m tests.cluster.layers
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ragcache_core.errors import InvalidInput
from tests.cluster.availability import Unavailable
from tests.cluster.releases import previous_release
from tools.images import IMAGES, make_images

_NICENESS = 10
"""The tests that run meanwhile come first."""


def main() -> None:
    """Entry point. What is in the way is told by the tests that need the images."""
    os.nice(_NICENESS)
    try:
        make_images(IMAGES)
        with tempfile.TemporaryDirectory() as folder:
            _version, checkout = previous_release(Path(folder))
            make_images(IMAGES, source=checkout)
    except (Unavailable, InvalidInput) as problem:
        print(f"no layers ahead: {problem}")


if __name__ == "__main__":
    main()
