"""Write or check the requirements of images, with the hash of each package.

::

    python -m tools.pins [--check] [EXTRA ...]

For each extra that an image installs, ``requirements/EXTRA.txt`` has all packages with version and
SHA-256, so that pip installs these files and no others (``--require-hashes``). pip chooses the
files for this machine, at the versions of ``constraints.txt``. So run it on a machine of the kind
that images are built for, with their version of Python. ``--check`` downloads nothing.

Source: https://pip.pypa.io/en/stable/topics/secure-installs/
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.images.closure import Project, closure
from tools.images.environment import find_installed

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "requirements"
UNUSED: Final = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Dependencies of vLLM's wheel that images leave out, as the Dockerfile's UNUSED has them."""

TORCH: Final = ("torch==2.13.0+cpu",)
EXTRAS: Final = ("gateway", "retriever", "engine-cpu", "cachestore", "operator", "cli")
BESIDE: Final = {"retriever": TORCH, "engine-cpu": TORCH}
"""What the Dockerfile installs with an extra. Only torch's build for CPUs has this version."""

BUILD: Final = {"build": ("setuptools>=77", "wheel"), "models": ("gguf",)}
"""Files of packages that are used to build images, and what they install."""

_LINE: Final = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+) --hash=sha256:[0-9a-f]{64}")


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a file for what pip would install.

    Args:
        report: Of ``pip install --report``. Packages that are built here have no line.

    Raises:
        ValueError: pip would install a package that has no hash.
    """
    lines = []
    for one in report["install"]:
        name, version = canonicalize_name(one["metadata"]["name"]), one["metadata"]["version"]
        if "dir_info" in one["download_info"]:
            continue
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise ValueError(f"{name}=={version} has no SHA-256")
        if name not in UNUSED:
            lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(lines)


def problems_of(lines: Sequence[str], needed: Set[str], pins: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the lines of a file.

    Args:
        needed: Names of the packages that the file has to install.
        pins: Version by name in ``constraints.txt``.
    """
    found: dict[str, str] = {}
    problems = []
    for line in lines:
        if (match := _LINE.fullmatch(line)) is None:
            problems.append(f"{line[:80]!r} is not NAME==VERSION --hash=sha256:DIGEST")
        else:
            found[match["name"]] = match["version"]
    problems += [f"{name} is missing" for name in sorted(needed - found.keys())]
    for name, version in found.items():
        wanted = pins.get(name, version)
        if version != wanted:
            problems.append(f"{name} is {version}, and constraints.txt has {wanted}")
    return problems


def read_pins(text: str) -> dict[str, str]:
    """Return the versions of a constraints file by name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): str(one.specifier)[2:] for one in requirements}


def write(name: str) -> None:
    """Write a file. Raises CalledProcessError if pip finds no versions that fit."""
    wanted = BUILD.get(name) or (*BESIDE.get(name, ()), f".[{name}]")
    options = ("--dry-run", "--ignore-installed", "--quiet", "--no-build-isolation")
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", *options, "--report", report.name]
        constraints = ("--constraint", "constraints.txt")
        subprocess.run([*command, *constraints, *wanted], check=True, cwd=ROOT)
        lines = lines_of(json.loads(Path(report.name).read_text()))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text("\n".join(lines) + "\n")
    print(f"pins: {name}: {len(lines)} packages")


def check(name: str) -> list[str]:
    """Return what is wrong with a file."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        return [f"{path.name} is missing; run python -m tools.pins {name}"]
    pins = read_pins((ROOT / "constraints.txt").read_text())
    if name in BUILD:
        needed: set[str] = {canonicalize_name(Requirement(one).name) for one in BUILD[name]}
    else:
        needed = {*closure(Project.read(ROOT), name, find_installed().get, UNUSED)}
    return [
        f"{path.name}: {one}" for one in problems_of(path.read_text().splitlines(), needed, pins)
    ]


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("extras", nargs="*", help="default: those of all images")
    arguments = parser.parse_args()
    names = arguments.extras or [*EXTRAS, *BUILD]
    if not arguments.check:
        for name in names:
            write(name)
    problems = [problem for name in names for problem in check(name)]
    for problem in problems:
        print(f"pins: {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
