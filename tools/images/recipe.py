"""Reads from the Dockerfile what an image holds and how it starts, so that both builds agree."""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from string import Template

from ragcache_core.errors import InvalidInput

BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""What a container has before any ENV."""

MODELS_STAGE = "bundled-models"
"""The stage that makes the bundled models that are not in the repository."""

_IGNORED = frozenset({"RUN", "WORKDIR"})
"""Their effect follows from the build arguments and is the same in every image."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The content and the start command of one image."""

    extra: str
    """The distribution's extra to install."""
    unused: tuple[str, ...] = ()
    """Distributions to leave out."""
    packages: tuple[str, ...] = ()
    """Debian packages."""
    sources: tuple[str, ...] = ()
    """Paths in the repository that the distribution is built from."""
    files: tuple[tuple[str, str], ...] = ()
    """(source, target) pairs: a path in the repository and its path in the image."""
    has_bundled_models: bool = False
    """Whether it also holds the models of MODELS_STAGE."""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    """``uid:gid``."""
    ports: tuple[int, ...] = ()
    volumes: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()


def parse_recipe(text: str, target: str, arguments: Mapping[str, str] | None = None) -> Recipe:
    """Read the recipe of one target of a Dockerfile.

    The target takes its environment from a build stage with ``COPY --from``. A stage inherits
    what the stage it starts FROM declares.

    Args:
        target: Name of the image's stage.
        arguments: Values for its ARGs.

    Raises:
        InvalidInput: The target does not exist, has no build stage, or an instruction cannot be
            carried over.
    """
    stages = _stages(text, arguments or {})
    image = stages.get(target)
    if image is None:
        known = ", ".join(stages) or "none"
        raise InvalidInput("Dockerfile", f"has no stage {target!r}", f"use one of: {known}")
    build = stages.get(image.copied_from)
    if build is None:
        problem = f"stage {target!r} copies from no build stage"
        raise InvalidInput("Dockerfile", problem, "add COPY --from=STAGE")
    return Recipe(
        extra=build.arguments.get("EXTRA", ""),
        unused=tuple(build.arguments.get("UNUSED", "").split()),
        packages=tuple(image.arguments.get("PACKAGES", "").split()),
        sources=tuple(source for source, _ in build.copies),
        files=tuple(image.copies),
        has_bundled_models=image.has_bundled_models,
        env=image.env,
        labels=image.labels,
        user=image.user,
        ports=tuple(image.ports),
        volumes=tuple(image.volumes),
        entrypoint=tuple(image.entrypoint),
    )


def _stages(text: str, given: Mapping[str, str]) -> dict[str, _Stage]:
    """Read every named stage of a Dockerfile, by name."""
    stages: dict[str, _Stage] = {}
    stage: _Stage | None = None
    for number, instruction, rest in _instructions(text):
        if instruction == "FROM":
            parent, _, name = re.sub(r" as ", " AS ", rest, flags=re.IGNORECASE).partition(" AS ")
            stage = stages[parent].child() if parent in stages else _Stage(given)
            if not name:
                raise _invalid(number, "FROM names no stage", "write FROM image AS name")
            stages[name] = stage
        elif stage is None and instruction == "ARG":
            continue  # of an image that stages start from, which these images do not have
        elif stage is None:
            raise _invalid(number, f"{instruction} is in no stage", "write FROM before it")
        elif instruction not in _IGNORED:
            stage.read(number, instruction, rest)
    return stages


class _Stage:
    """The sum of one stage's instructions."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self.arguments: dict[str, str] = {}
        self.copies: list[tuple[str, str]] = []
        self.copied_from = ""
        self.has_bundled_models = False
        self.env = dict(BASE_ENV)
        self.labels: dict[str, str] = {}
        self.user = ""
        self.ports: list[int] = []
        self.volumes: list[str] = []
        self.entrypoint: list[str] = []

    def child(self) -> _Stage:
        """Copy this stage for one that starts FROM it; ARGs are not inherited."""
        stage = copy.deepcopy(self)
        stage.arguments = {}
        return stage

    def read(self, number: int, instruction: str, rest: str) -> None:
        """Add one instruction."""
        words = [self._expanded(word) for word in shlex.split(rest)]
        match instruction:
            case "ARG":
                name, _, default = words[0].partition("=")
                self.arguments[name] = self._given.get(name, default)
            case "COPY":
                self._copy(number, words)
            case "ENV":
                self.env |= _pairs(words)
            case "LABEL":
                self.labels |= _pairs(words)
            case "USER":
                self.user = words[0]
            case "EXPOSE":
                self.ports += map(int, words)
            case "VOLUME":
                self.volumes += words
            case "ENTRYPOINT":
                self.entrypoint = json.loads(rest)
            case _:
                raise _invalid(number, f"{instruction} is not understood", "teach tools/images it")

    def _copy(self, number: int, words: list[str]) -> None:
        """Note files copied from the repository; a build stage's files are the environment."""
        if words[0] == f"--from={MODELS_STAGE}":
            self.has_bundled_models = True
            return
        if words[0].startswith("--from="):
            self.copied_from = words[0].removeprefix("--from=")
            return
        *sources, target = words
        if any(word.startswith("--") for word in words):
            raise _invalid(number, f"COPY {words[0]} is not understood", "teach tools/images it")
        self.copies += [(source, str(PurePosixPath(target))) for source in sources]

    def _expanded(self, word: str) -> str:
        return Template(word).safe_substitute({**self.arguments, **self.env})


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line number, name, rest) of each instruction, its continuation lines joined."""
    found: list[tuple[int, str, str]] = []
    pending = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        name, _, rest = re.sub(r"\s+", " ", pending).partition(" ")
        found.append((number, name.upper(), rest))
        pending = ""
    return found


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _invalid(number: int, problem: str, fix: str) -> InvalidInput:
    return InvalidInput(f"Dockerfile line {number}", problem, fix)
