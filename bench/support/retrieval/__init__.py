"""Collections, an embeddings endpoint and running retrievers, for benchmarks of searches."""
