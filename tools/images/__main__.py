"""Build the project's images as OCI archives, without a Docker daemon or a registry."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from ragcache_core.errors import RagCacheError
from tools.images.build import IMAGES, ROOT, build_images, make_images


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=IMAGES, default=list(IMAGES), metavar="NAME")
    parser.add_argument("--tag", help="default: the project's version")
    parser.add_argument("--source", type=Path, default=ROOT, help="another checkout to build")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=Path, help="folder for the archives")
    target.add_argument(
        "--load",
        type=shlex.split,
        metavar="COMMAND",
        help="what reads each archive: 'ctr --namespace k8s.io images import -', 'docker load'",
    )
    given = parser.parse_args()
    try:
        if given.out:
            for built in build_images(
                given.only, given.out, given.tag, source=given.source, log=_say
            ):
                _say(f"{built.name}: {built.path}, {built.path.stat().st_size / 1e6:.0f} MB")
        else:
            for image in make_images(given.only, given.tag, source=given.source, log=_say):
                image.load(given.load)
                _say(f"{image.name}: loaded")
    except RagCacheError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def _say(line: str) -> None:
    # A build takes minutes, so that its progress must also appear in a pipe.
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
