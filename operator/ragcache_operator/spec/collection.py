"""The RagCollection object: documents of one team, kept in one collection of one RagCache."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ragcache_operator.spec.values import (
    HTTP_URL,
    ChunkingSpec,
    ForeignName,
    ManifestModel,
    ObjectMeta,
    ObjectName,
    RelativePath,
    SecretKey,
    ServerSchema,
    StringPattern,
)

KIND = "RagCollection"

_DURATION = r"([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?"


def parse_duration(text: str) -> int:
    """Seconds of a duration like ``90s``, ``5m`` or ``1h30m``. Raises ValueError."""
    match = re.fullmatch(_DURATION, text)
    if match is None or not text:
        raise ValueError(f"{text!r} is no duration")
    hours, minutes, seconds = (int(part[:-1]) if part else 0 for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


class CacheRef(ManifestModel):
    """A RagCache in the same namespace."""

    name: ObjectName
    """Name of the RagCache, in the namespace of this object."""


class SyncSpec(ManifestModel):
    """When sources are looked at again."""

    interval: Annotated[
        str,
        Field(min_length=2, max_length=18),
        StringPattern(_DURATION, "duration", "write it like 90s, 5m or 1h30m"),
    ] = "5m"
    """Time between two looks at the sources, from 10s to 24h, like 90s, 5m or 1h30m. A change of
    a ConfigMap or of this object is seen at once."""

    @property
    def interval_s(self) -> int:
        """The interval in seconds."""
        return parse_duration(self.interval)


class ConfigMapSource(ManifestModel):
    """Documents in a ConfigMap, one per key."""

    name: ForeignName
    """Name of the ConfigMap, in the namespace of this object."""


class VolumeSource(ManifestModel):
    """Documents in a volume."""

    claim_name: ForeignName
    """Name of the volume claim, in the namespace of this object. It is mounted read only."""
    path: RelativePath = "."
    """Folder in the volume whose files are the documents. The default is the whole volume."""


class HttpSource(ManifestModel):
    """A document or an archive of documents behind a URL."""

    url: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            rf"{HTTP_URL}(\?[^\s#]*)?", "URL", "write it like https://example.com/handbook.zip"
        ),
    ]
    """URL of a text or Markdown file, or of a .tar.gz, .tgz or .zip archive of such files."""
    bearer_secret: SecretKey | None = None
    """Token to send as "Authorization: Bearer". Without it, none is sent."""


class GitSource(ManifestModel):
    """Documents in a Git repository."""

    url: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            HTTP_URL, "URL of a repository", "write it like https://example.com/team/handbook.git"
        ),
    ]
    """URL of the repository, http or https."""
    ref: Annotated[
        str,
        Field(max_length=255),
        StringPattern(
            r"[A-Za-z0-9][A-Za-z0-9._/+-]*",
            "branch, tag or commit",
            "write it like main, v1.2 or a commit's hash",
        ),
    ] = "HEAD"
    """Branch, tag or commit to read. The default is the repository's default branch."""
    path: RelativePath = "."
    """Folder in the repository whose files are the documents. The default is all of it."""
    bearer_secret: SecretKey | None = None
    """Token to send as "Authorization: Bearer". Without it, none is sent."""


class SourceSpec(ManifestModel):
    """Where documents come from: exactly one of the fields."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    config_map: ConfigMapSource | None = None
    """Documents in a ConfigMap, one per key."""
    volume: VolumeSource | None = None
    """Documents in a volume."""
    http: HttpSource | None = None
    """A document or an archive of documents behind a URL."""
    git: GitSource | None = None
    """Documents in a Git repository."""

    @property
    def given(self) -> dict[str, ManifestModel]:
        """Those of the four that are given, by their names in manifests."""
        four = {
            "configMap": self.config_map,
            "volume": self.volume,
            "http": self.http,
            "git": self.git,
        }
        return {name: source for name, source in four.items() if source is not None}

    @property
    def kind(self) -> str:
        """Which of the four it is: configMap, volume, http or git."""
        [kind] = self.given
        return kind


class RagCollectionSpec(ManifestModel):
    """Which documents to keep where."""

    cache_ref: CacheRef
    """The RagCache that keeps the documents. Cannot change after the object was made."""
    collection: ObjectName | None = None
    """Collection of the RagCache that the documents go into. Without it, one named as this object.
    Cannot change after the object was made."""
    chunking: ChunkingSpec | None = None
    """How this collection's documents are cut. Without it, as the RagCache says."""
    prune: bool = True
    """Whether a document that is gone from the sources is deleted from the collection. Documents
    that came another way are never touched."""
    sync: SyncSpec = SyncSpec()
    """When the sources are looked at again."""
    sources: Annotated[
        tuple[SourceSpec, ...],
        Field(strict=False, min_length=1, max_length=32),
        ServerSchema({"x-kubernetes-list-type": "atomic"}),
    ]
    """Where the documents come from."""


class RagCollection(ManifestModel):
    """Documents for a RagCache, brought from a ConfigMap, a volume, a URL or a Git repository and
    kept in step with it."""

    api_version: Literal["ragcache.dev/v1alpha1"]
    kind: Literal["RagCollection"]
    metadata: ObjectMeta
    spec: RagCollectionSpec
    """Which documents to keep where."""

    @property
    def collection_name(self) -> str:
        """The collection of the RagCache that the documents go into."""
        return self.spec.collection or self.metadata.name
