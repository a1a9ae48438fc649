"""Encodes and decodes KV (``ragcache_core.identity.variant.Codec``), keys and values separately.

``part`` codes layers on the CPU. ``device`` decodes on a GPU. ``grouped`` has the
codecs INT8, FP8 and INT4, ``gse`` HA-RAG's GSE-8, and ``packed`` the lossless one.
"""

from ragcache_kv.codecs.part import (
    decode_part,
    encode_part,
    encoded_part_bytes,
    native_part_bytes,
    warm_up,
)

__all__ = [
    "decode_part",
    "encode_part",
    "encoded_part_bytes",
    "native_part_bytes",
    "warm_up",
]
