"""The tiers inside an engine: a pool on its device, and host memory, above the cache store."""
