"""Python's side of an image: an environment in which nothing but what it needs is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from ragcache_core.errors import InvalidInput
from tools.images.layer import Entry, digest_of, portable_bytecode, with_parents

PREFIX: Final = "opt/ragcache"
"""Where the environment lies in every image, relative to its root."""

PYTHON: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


def skeleton() -> list[Entry]:
    """The environment with nothing installed, as ``python -m venv --without-pip`` makes it."""
    version = ".".join(map(str, sys.version_info[:2]))
    settings = f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n"
    return with_parents(
        [
            Entry(f"{PREFIX}/pyvenv.cfg", settings.encode()),
            Entry(f"{PREFIX}/bin/python", link=f"/usr/bin/{PYTHON}"),
            Entry(f"{PREFIX}/bin/python3", link="python"),
            Entry(f"{PREFIX}/bin/{PYTHON}", link="python"),
            Entry(f"{PREFIX}/lib/{PYTHON}/site-packages", mode=0o755),
        ]
    )


def key(distribution: Distribution) -> list[str]:
    """What a distribution's files follow from: its RECORD has the hashes of all of them."""
    record = distribution.read_text("RECORD") or ""
    return [distribution.name, distribution.version, digest_of(record.encode())]


def size(distribution: Distribution) -> int:
    """Bytes of its files, without bytecode."""
    return sum(file.size or 0 for file in distribution.files or ())


def installed(found: Iterable[Distribution], prefix: Path) -> list[Entry]:
    """The files of distributions that are installed below prefix, with bytecode.

    Raises InvalidInput if files are missing: the environment would be copied incomplete.
    """
    entries: dict[str, Entry] = {}
    for distribution in found:
        for entry in _files(distribution, prefix):
            entries[entry.path] = entry
    return with_parents(entries.values())


def _files(distribution: Distribution, prefix: Path) -> Iterator[Entry]:
    if distribution.files is None:
        problem = f"{distribution.name} has no RECORD of its files"
        raise InvalidInput("environment", problem, "install it from a wheel, with `make setup`")
    for recorded in distribution.files:
        source = Path(os.path.normpath(str(recorded.locate())))
        if source.suffix == ".pyc":  # made below for every module
            continue
        if not source.is_file() or not source.is_relative_to(prefix):
            problem = f"{distribution.name} lacks {source}, or has it outside of {prefix}"
            raise InvalidInput("environment", problem, "remove .venv and run `make setup`")
        relative = source.relative_to(prefix)
        target = f"{PREFIX}/{relative}"
        mode = 0o755 if os.access(source, os.X_OK) else 0o644
        if relative.parts[0] == "bin":
            yield Entry(target, _script(source, prefix), mode)
            continue
        yield Entry(target, source, mode)
        if source.suffix == ".py":
            bytecode = portable_bytecode(source, f"/{target}")
            if bytecode is not None:
                name = f"{source.stem}.{sys.implementation.cache_tag}.pyc"
                yield Entry(f"{PREFIX}/{relative.parent}/__pycache__/{name}", bytecode)


def _script(source: Path, prefix: Path) -> bytes:
    """A program; if it is a script, it names the image's interpreter instead of this one."""
    content = source.read_bytes()
    if content.startswith(b"#!"):
        return content.replace(f"{prefix}/bin/".encode(), f"/{PREFIX}/bin/".encode())
    return content


def find_installed() -> dict[str, Distribution]:
    """The distributions of the running environment, by canonical name."""
    folder = sysconfig.get_path("purelib")
    return {canonicalize_name(each.name): each for each in distributions(path=[folder])}


def source_key(checkout: Path, sources: Iterable[str]) -> list[list[str]]:
    """What a build of the project's own distribution follows from."""
    return [
        [str(file.relative_to(checkout)), hashlib.sha256(file.read_bytes()).hexdigest()]
        for source in sources
        for file in _source_files(checkout / source)
    ]


@contextmanager
def built(checkout: Path, sources: Iterable[str]) -> Iterator[tuple[Distribution, Path]]:
    """The project's own distribution, built from sources only, and the prefix it is installed in.

    Raises InvalidInput with pip's own words if it cannot be built.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A build leaves files beside its sources.
        stage, prefix = Path(folder, "source"), Path(folder, "prefix")
        for source in sources:
            for file in _source_files(checkout / source):
                target = stage / file.relative_to(checkout)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation"]
        placed = ["--ignore-installed", "--no-compile", "--no-warn-script-location"]
        done = subprocess.run(
            [*pip, *offline, *placed, "--root-user-action=ignore", "--prefix", prefix, stage],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            fix = "mend it until `pip wheel --no-deps .` succeeds"
            raise InvalidInput("source", f"{checkout} is not built: {done.stderr.strip()}", fix)
        site = prefix / "lib" / PYTHON / "site-packages"
        (distribution,) = distributions(path=[str(site)])
        for script in (prefix / "bin").iterdir():
            # pip names the interpreter that ran it.
            own = f"#!{sys.executable}".encode()
            script.write_bytes(script.read_bytes().replace(own, f"#!{prefix}/bin/python".encode()))
        yield distribution, prefix


def _source_files(path: Path) -> list[Path]:
    """The files of a source folder, or the file, but for what tools leave there."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidInput("source", f"{path} does not exist", "copy only what there is")
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and not any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts)
    )
