"""Identifies what a sync would read, without reading the sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragcache_operator.kube.resources import Object
from ragcache_operator.spec.collection import RagCollection

_CHARS = 8


@dataclass(frozen=True, slots=True)
class Revision:
    """Hashes of the inputs of a sync.

    Args:
        spec: Hash of the spec without the schedule, and of the RagCache's uid.
        contents: Hash of the ConfigMaps. Only a sync itself reads the other sources.
    """

    spec: str
    contents: str

    def __str__(self) -> str:
        return f"{self.spec}-{self.contents}"

    @classmethod
    def parse(cls, text: str) -> Revision:
        """Parse what ``str`` returns."""
        spec, _, contents = text.partition("-")
        return cls(spec, contents)


def config_map_names(collection: RagCollection) -> list[str]:
    """Return the names of the ConfigMaps among the sources, without duplicates."""
    found = (source.config_map for source in collection.spec.sources)
    return list(dict.fromkeys(source.name for source in found if source is not None))


def claim_names(collection: RagCollection) -> list[str]:
    """Return the names of the volume claims among the sources, without duplicates."""
    found = (source.volume for source in collection.spec.sources)
    return list(dict.fromkeys(source.claim_name for source in found if source is not None))


def revision_of(
    collection: RagCollection, cache_uid: str, config_maps: Mapping[str, Object | None]
) -> Revision:
    """Return the current revision.

    It contains the uid of the RagCache, because a recreated RagCache has no documents. It contains
    the data of ConfigMaps and not their versions, which also change with labels and annotations.

    Args:
        config_maps: ConfigMaps by name. None for a missing one.
    """
    spec = collection.spec.model_dump(mode="json", by_alias=True, exclude={"sync"})
    contents = {
        name: None if found is None else [found.get("data"), found.get("binaryData")]
        for name, found in config_maps.items()
    }
    return Revision(_digest([cache_uid, spec]), _digest(contents))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_CHARS]
