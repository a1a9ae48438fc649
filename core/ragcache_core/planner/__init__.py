"""Choose the order of chunks, the engine, what to load, and what to compute ahead."""
