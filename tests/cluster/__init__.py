"""A real Kubernetes for tests: an API server alone, or a whole node with containers."""
