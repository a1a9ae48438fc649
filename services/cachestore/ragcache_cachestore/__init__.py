"""The cache store: chunk-caches by (chunk, prefix), in memory and in RocksDB, over gRPC."""
