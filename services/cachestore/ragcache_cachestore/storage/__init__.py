"""The bytes of both tiers and the metadata on disk: memory, the file of values, RocksDB."""
