"""The RagCollection object: the sources whose documents one collection of a RagCache holds."""

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
    ServerList,
    StringPattern,
)

KIND = "RagCollection"

MAX_QUOTA = 1 << 53
"""The largest quota of a collection. JSON carries integers up to this exactly."""

_DURATION = r"([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?"


def parse_duration(text: str) -> int:
    """Parse a duration like ``90s``, ``5m`` or ``1h30m`` to seconds.

    Raises:
        ValueError: The text is not a duration.
    """
    match = re.fullmatch(_DURATION, text)
    if match is None or not text:
        raise ValueError(f"{text!r} is not a duration")
    hours, minutes, seconds = (int(part[:-1]) if part else 0 for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


class CacheRef(ManifestModel):
    """CacheRef names a RagCache in the same namespace."""

    name: ObjectName
    """Name of the RagCache in the namespace of this object."""


class SyncSpec(ManifestModel):
    """SyncSpec sets when the operator reads the sources again."""

    interval: Annotated[
        str,
        Field(min_length=2, max_length=18),
        StringPattern(_DURATION, "duration", "write it like 90s, 5m or 1h30m"),
    ] = "5m"
    """Time between two syncs, from 10s to 24h, like 90s, 5m or 1h30m. A change of this object or
    of a ConfigMap starts a sync earlier."""

    @property
    def interval_s(self) -> int:
        """The interval in seconds."""
        return parse_duration(self.interval)


class ConfigMapSource(ManifestModel):
    """ConfigMapSource reads each key of a ConfigMap as one document."""

    name: ForeignName
    """Name of the ConfigMap in the namespace of this object."""


class VolumeSource(ManifestModel):
    """VolumeSource reads documents from a volume."""

    claim_name: ForeignName
    """Name of the volume claim in the namespace of this object. The sync pod mounts it
    read-only."""
    path: RelativePath = "."
    """Folder in the volume that contains the documents. The default is the whole volume."""


class HttpSource(ManifestModel):
    """HttpSource downloads a document or an archive of documents."""

    url: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            rf"{HTTP_URL}(\?[^\s#]*)?", "URL", "write it like https://example.com/handbook.zip"
        ),
    ]
    """URL of a document, or of a .tar.gz, .tgz or .zip archive of such files."""
    bearer_secret: SecretKey | None = None
    """Token that the sync sends as "Authorization: Bearer". The Secret's entry ragcache-hosts must
    name the host of the URL. If unset, it sends no token."""


class GitSource(ManifestModel):
    """GitSource reads documents from a Git repository."""

    url: Annotated[
        str,
        Field(max_length=2048),
        StringPattern(
            HTTP_URL, "URL of a repository", "write it like https://example.com/team/handbook.git"
        ),
    ]
    """HTTP or HTTPS URL of the repository."""
    ref: Annotated[
        str,
        Field(max_length=255),
        StringPattern(
            r"[A-Za-z0-9][A-Za-z0-9._/+-]*",
            "branch, tag or commit",
            "write it like main, v1.2 or a commit's hash",
        ),
    ] = "HEAD"
    """Branch, tag or commit to read. HEAD is the repository's default branch."""
    path: RelativePath = "."
    """Folder in the repository that contains the documents. The default is the whole
    repository."""
    bearer_secret: SecretKey | None = None
    """Token that the sync sends as "Authorization: Bearer". The Secret's entry ragcache-hosts must
    name the host of the URL. If unset, it sends no token."""


class SourceSpec(ManifestModel):
    """SourceSpec names one source of documents. Exactly one of its fields must be set."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    config_map: ConfigMapSource | None = None
    """A ConfigMap. The sync reads each key as one document."""
    volume: VolumeSource | None = None
    """A volume with document files."""
    http: HttpSource | None = None
    """A URL of one document or of an archive of documents."""
    git: GitSource | None = None
    """A Git repository with document files."""

    @property
    def given(self) -> dict[str, ManifestModel]:
        """The fields that are set, by their names in manifests."""
        fields = {
            "configMap": self.config_map,
            "volume": self.volume,
            "http": self.http,
            "git": self.git,
        }
        return {name: source for name, source in fields.items() if source is not None}

    @property
    def kind(self) -> str:
        """The name of the field that is set: configMap, volume, http or git."""
        [kind] = self.given
        return kind


class RagCollectionSpec(ManifestModel):
    """RagCollectionSpec sets the sources of a collection and the RagCache that stores it."""

    cache_ref: CacheRef
    """The RagCache that stores the documents. This field is immutable."""
    collection: ObjectName | None = None
    """Name of the collection in the RagCache. If unset, the collection has the name of this
    object. This field is immutable."""
    chunking: ChunkingSpec | None = None
    """How the retriever splits this collection's documents. If unset, a sync does not change it,
    and a new collection has the RagCache's chunking."""
    index: Literal["auto", "flat", "ivf", "hnsw"] | None = None
    """Kind of the collection's vector index, with the values of spec.retriever.index.kind of the
    RagCache. If unset, a sync does not change it."""
    max_documents: Annotated[int, Field(ge=0, le=MAX_QUOTA)] | None = None
    """Maximum number of documents of the collection, of all owners. 0 removes the limit. If unset,
    a sync does not change it."""
    max_text_bytes: Annotated[int, Field(ge=0, le=MAX_QUOTA)] | None = None
    """Maximum size of the texts of the collection in bytes of UTF-8. 0 removes the limit. If unset,
    a sync does not change it."""
    lexical_weight: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Share of the lexical score (BM25) in the scores of hybrid searches, from 0 to 1. The
    similarity of embeddings has the rest. If unset, a sync does not change it."""
    labels: bool | None = None
    """Whether prompts name the document and the section before each chunk. If unset, a sync does
    not change it, and a new collection has labels."""
    prune: bool = True
    """Whether a sync deletes documents that are no longer in the sources. A sync never deletes
    documents that it did not add."""
    sync: SyncSpec = SyncSpec()
    """When the operator reads the sources again."""
    sources: Annotated[tuple[SourceSpec, ...], ServerList(32, min_items=1)]
    """The sources of the documents."""


class RagCollection(ManifestModel):
    """RagCollection keeps one collection of a RagCache in sync with its sources. Sources are
    ConfigMaps, volumes, URLs and Git repositories."""

    api_version: Literal["ragcache.dev/v1alpha1"]
    kind: Literal["RagCollection"]
    metadata: ObjectMeta
    spec: RagCollectionSpec
    """Desired sources and settings of the collection."""

    @property
    def collection_name(self) -> str:
        """Name of the collection in the RagCache that stores the documents."""
        return self.spec.collection or self.metadata.name


MOUNTS = "/sources"
"""Folder with one mount for each source that is a ConfigMap or a volume."""


def mount_name(index: int) -> str:
    """Return the mount name of the source with this index in ``spec.sources``."""
    return f"source-{index}"


def token_variable(index: int) -> str:
    """Return the environment variable with the token of the source with this index."""
    return f"RAGCACHE_SOURCE_{index}_TOKEN"


SECRET_HOSTS = "ragcache-hosts"
"""Entry of a Secret that names the hosts which sources may send it to, with spaces between. A host
has its port if the URL has one. Whoever writes the Secret decides, and not the author of a
collection: a Secret without the entry is no token of a source."""


def hosts_variable(index: int) -> str:
    """Return the environment variable with the hosts that the token of a source may go to."""
    return f"RAGCACHE_SOURCE_{index}_HOSTS"
