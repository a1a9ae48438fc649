"""What a sync sends of a document, and the digest that tells whether it has changed."""

from __future__ import annotations

import hashlib
import json

from ragcache_cli.clients.collection_client import DocumentContent
from ragcache_cli.sources.documents import DocumentFile, read_content, read_fields, read_text
from ragcache_core.documents.formats import DocumentFormat
from ragcache_core.errors import InvalidInput

_OWN_FIELDS = frozenset({"collection", "id"})
"""Fields of a line of JSON that the sync sets itself."""


def read_document(file: DocumentFile) -> tuple[DocumentContent, str]:
    """Read a document; return its content and its digest. Raises InvalidInput."""
    if file.kind is DocumentFormat.JSON_LINES:
        named = read_fields(file)
        fields = {name: value for name, value in named.items() if name not in _OWN_FIELDS}
        if not isinstance(fields.get("metadata", {}), dict):
            raise InvalidInput(file.where, "has metadata that is no JSON object", "correct it")
        canonical = json.dumps(fields, sort_keys=True).encode()
        return DocumentContent(fields), _digest(file.kind.media_type, canonical)
    media_type = file.kind.media_type
    if file.kind.is_plain:
        text = read_text(file)
        fields = {"text": text, "content_type": media_type}
        return DocumentContent(fields), _digest(media_type, text.encode())
    content = read_content(file)
    return DocumentContent({"content_type": media_type}, content), _digest(media_type, content)


def _digest(media_type: str, content: bytes) -> str:
    return hashlib.blake2b(media_type.encode() + b"\0" + content, digest_size=16).hexdigest()
