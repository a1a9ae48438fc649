"""What tests, benchmarks and tools share: it starts services, engines, collectors and browsers."""
