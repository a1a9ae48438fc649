"""What is known of a RagCollection's sources without reading them, as a name for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragcache_operator.kube.resources import Object
from ragcache_operator.spec import RagCollection

_CHARS = 8


@dataclass(frozen=True, slots=True)
class Revision:
    """Names what a sync starts from.

    spec: of what is asked for, the schedule apart, and of the RagCache that is to hold it.
    contents: of the ConfigMaps; other sources are known only to who reads them.
    """

    spec: str
    contents: str

    def __str__(self) -> str:
        return f"{self.spec}-{self.contents}"

    @classmethod
    def parse(cls, text: str) -> Revision:
        """A revision as it was written."""
        spec, _, contents = text.partition("-")
        return cls(spec, contents)


def config_map_names(collection: RagCollection) -> list[str]:
    """ConfigMaps among the sources, each once."""
    found = (source.config_map for source in collection.spec.sources)
    return list(dict.fromkeys(source.name for source in found if source is not None))


def claim_names(collection: RagCollection) -> list[str]:
    """Volume claims among the sources, each once."""
    found = (source.volume for source in collection.spec.sources)
    return list(dict.fromkeys(source.claim_name for source in found if source is not None))


def revision_of(
    collection: RagCollection, cache_uid: str, config_maps: Mapping[str, Object | None]
) -> Revision:
    """The revision now. config_maps: by name, None for one that is not there.

    A RagCache that was made anew has nothing yet, so its uid counts. Of a ConfigMap its contents
    count and not its version, which moves for labels and annotations too.
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
