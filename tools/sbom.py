"""Print a bill of materials of the environment, as CycloneDX JSON.

::

    python -m tools.sbom [--extra NAME ...] > sbom.json

It has each installed distribution that the package needs, with version, license, hashes of its
files' records and what it depends on. With ``--extra`` it has those of some parts only, as an image
does: ``--extra gateway``.

Source: CycloneDX 1.6, https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME: Final = "ragcache"
_SPDX: Final = re.compile(r"[A-Za-z0-9.+() -]{1,200}")

Json = dict[str, Any]
Node = tuple[str, frozenset[str]]
"""A distribution by its canonical name, with the extras that are wanted of it."""


def requirements_of(distribution: metadata.Distribution, extras: Iterable[str]) -> list[Node]:
    """Return what a distribution needs here, without what only other platforms need."""
    wanted = ("", *extras)
    found: list[Node] = []
    for text in distribution.requires or ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted):
            found.append((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def closure(extras: Iterable[str]) -> dict[str, set[str]]:
    """Return the installed distributions that the package needs, and what each one depends on.

    A distribution that is not installed is left out: images leave out some that vLLM names.
    """
    depends: dict[str, set[str]] = {}
    seen: set[Node] = set()
    waiting: list[Node] = [(NAME, frozenset(extras))]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        name, wanted = node
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needs = requirements_of(distribution, wanted)
        depends.setdefault(name, set()).update(other for other, _ in needs)
        waiting += needs
    return {name: needs & depends.keys() for name, needs in depends.items()}


def component(distribution: metadata.Distribution) -> Json:
    """Return a distribution as a component."""
    name, version = canonicalize_name(distribution.name), distribution.version
    found: Json = {
        "type": "library",
        "bom-ref": reference(distribution),
        "name": name,
        "version": version,
        "purl": reference(distribution),
    }
    [license_, *_] = distribution.metadata.get_all("License-Expression") or [""]
    if _SPDX.fullmatch(license_):
        found["licenses"] = [{"expression": license_}]
    # The record has the hash of each file that was installed.
    if (record := distribution.read_text("RECORD")) is not None:
        digest = hashlib.sha256(record.encode()).hexdigest()
        found["properties"] = [{"name": f"{NAME}:record:sha256", "value": digest}]
    return found


def reference(distribution: metadata.Distribution) -> str:
    """Return the package URL of a distribution."""
    version = distribution.version.replace("+", "%2B")
    return f"pkg:pypi/{canonicalize_name(distribution.name)}@{version}"


def bill(depends: Mapping[str, set[str]]) -> Json:
    """Return the bill of materials of these distributions."""
    installed = {name: metadata.distribution(name) for name in sorted(depends)}
    references = {name: reference(one) for name, one in installed.items()}
    own = component(installed[NAME]) | {"type": "application"}
    components = [component(one) for name, one in installed.items() if name != NAME]
    # The same content has the same number.
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(sorted(references.values())))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [
            {"ref": references[name], "dependsOn": sorted(references[one] for one in needs)}
            for name, needs in sorted(depends.items())
        ],
    }


def main() -> int:
    """Print the bill of materials."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(metadata.metadata(NAME).get_all("Provides-Extra") or ())
    parser.add_argument("--extra", action="append", choices=known, help="Default: all extras.")
    extras = parser.parse_args().extra or known
    json.dump(bill(closure(extras)), sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
