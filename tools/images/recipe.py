"""What an image holds and how it starts, read from its Dockerfile, so that both builds agree."""

from __future__ import annotations

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

_IGNORED = frozenset({"RUN", "WORKDIR"})
"""What they do follows from the build arguments, and is the same in every image."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One image.

    extra: the distribution's extra it installs. unused: distributions left out of it. packages:
    Debian's. sources: what the distribution is built from; files: (source, target) pairs copied as
    they are, both relative to the repository's root and the image's. user: ``uid:gid``.
    """

    extra: str
    unused: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    ports: tuple[int, ...] = ()
    volumes: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()


def parse_recipe(text: str, arguments: Mapping[str, str] | None = None) -> Recipe:
    """The recipe of a Dockerfile of two stages, the first of which makes the environment.

    arguments: values for its ARGs. Raises InvalidInput for an instruction that would be lost.
    """
    given = arguments or {}
    stages: list[_Stage] = []
    for number, instruction, rest in _instructions(text):
        if instruction == "FROM":
            stages.append(_Stage(given))
        elif not stages or len(stages) > 2:
            raise _invalid(number, "is in neither the build stage nor the image's", "use two FROM")
        elif instruction not in _IGNORED:
            stages[-1].read(number, instruction, rest)
    if len(stages) != 2:
        raise InvalidInput("Dockerfile", f"has {len(stages)} stages", "write a build stage and one")
    build, image = stages
    return Recipe(
        extra=build.arguments.get("EXTRA", ""),
        unused=tuple(build.arguments.get("UNUSED", "").split()),
        packages=tuple(image.arguments.get("PACKAGES", "").split()),
        sources=tuple(source for source, _ in build.copies),
        files=tuple(image.copies),
        env=image.env,
        labels=image.labels,
        user=image.user,
        ports=tuple(image.ports),
        volumes=tuple(image.volumes),
        entrypoint=tuple(image.entrypoint),
    )


class _Stage:
    """What one stage's instructions add up to."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self.arguments: dict[str, str] = {}
        self.copies: list[tuple[str, str]] = []
        self.env = dict(BASE_ENV)
        self.labels: dict[str, str] = {}
        self.user = ""
        self.ports: list[int] = []
        self.volumes: list[str] = []
        self.entrypoint: list[str] = []

    def read(self, number: int, instruction: str, rest: str) -> None:
        """Take one instruction in."""
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
        """A stage's own files come with the environment; others are copied from the repository."""
        if words[0].startswith("--from="):
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
