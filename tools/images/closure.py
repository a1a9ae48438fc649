"""Which installed distributions an extra needs, and which of them images share."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ragcache_core.errors import InvalidInput

Find = Callable[[str], Distribution | None]
"""The installed distribution of a canonical name; None: there is none."""


@dataclass(frozen=True, slots=True)
class Project:
    """The distribution that is built here, as its pyproject.toml describes it."""

    name: str
    version: str
    requires: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]

    @classmethod
    def read(cls, folder: Path) -> Project:
        """The project of a checkout. Raises InvalidInput if the folder holds none."""
        try:
            table = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        except (OSError, KeyError) as error:
            problem = f"{folder} has no pyproject.toml with a [project] ({error})"
            raise InvalidInput("source", problem, "name a checkout of the project") from error
        return cls(
            table["name"],
            table["version"],
            tuple(table.get("dependencies", ())),
            {name: tuple(extra) for name, extra in table["optional-dependencies"].items()},
        )

    def requirements(self, extra: str) -> tuple[str, ...]:
        """What the project needs with the extra. Raises InvalidInput for an unknown one."""
        if extra not in self.extras:
            known = ", ".join(sorted(self.extras))
            raise InvalidInput(
                "EXTRA", f"{self.name} has no extra {extra!r}", f"use one of {known}"
            )
        return self.requires + self.extras[extra]


def closure(
    project: Project, extra: str, find: Find, unused: Collection[str] = ()
) -> dict[str, Distribution]:
    """Everything that project[extra] needs, but for the project itself, by canonical name.

    Requirements' markers are judged for the running interpreter. unused: names left out, and
    what only they need. Raises InvalidInput if one is not installed in a version that fits.
    """
    left_out = {canonicalize_name(name) for name in unused}
    own_name = canonicalize_name(project.name)
    needed: dict[str, Distribution] = {}
    pending = [(own_name, extra)]
    seen = set(pending)
    while pending:
        name, wanted = pending.pop()
        if name == own_name:
            requires = project.requirements(wanted) if wanted else project.requires
        else:
            requires = tuple(needed[name].requires or ())
        for requirement in map(Requirement, requires):
            dependency = canonicalize_name(requirement.name)
            marker = requirement.marker
            if dependency in left_out or (marker and not marker.evaluate({"extra": wanted})):
                continue
            if dependency != own_name:
                needed[dependency] = _installed(requirement, find)
            steps = {(dependency, extra) for extra in ("", *requirement.extras)} - seen
            seen |= steps
            pending += sorted(steps)
    return needed


def _installed(requirement: Requirement, find: Find) -> Distribution:
    found = find(canonicalize_name(requirement.name))
    if found is None:
        problem = "is not installed in this environment"
    elif not requirement.specifier.contains(found.version, prereleases=True):
        problem = f"is installed as {found.version}, which does not fit"
    else:
        return found
    raise InvalidInput("environment", f"{requirement} {problem}", "run `make setup`")


def shared_groups(
    needs: Mapping[str, Collection[str]], size: Callable[[str], int]
) -> list[tuple[frozenset[str], list[str]]]:
    """Distributions grouped by the images that need them, each group a layer of these images.

    A layer is unpacked once for all images that have the same ones under it, so those whose sharing
    saves most bytes come first. needs: names by image. size: bytes of a distribution.
    """
    users: dict[str, set[str]] = {}
    for image, names in needs.items():
        for name in names:
            users.setdefault(name, set()).add(image)
    groups: dict[frozenset[str], list[str]] = {}
    for name in sorted(users):
        groups.setdefault(frozenset(users[name]), []).append(name)

    def saved(group: tuple[frozenset[str], list[str]]) -> tuple[int, list[str]]:
        images, names = group
        return -sum(map(size, names)) * (len(images) - 1), names

    return sorted(groups.items(), key=saved)
