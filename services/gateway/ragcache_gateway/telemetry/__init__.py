"""What the gateway measures and reports: metrics, span attributes, the state of the cache store."""
