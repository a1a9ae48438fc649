"""What gateways are told of an engine's caches."""
