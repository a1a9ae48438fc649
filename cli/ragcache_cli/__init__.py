"""The ``ragcache`` command: runs a RagCache, ingests documents, asks questions."""
