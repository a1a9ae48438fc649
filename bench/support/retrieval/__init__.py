"""Generated documents, an embeddings endpoint and running retrievers, for benchmarks."""
