"""KV values outside the engine: layout, codecs, key rotation, and clients of the cache store."""
