"""API keys and tenants of one gateway."""
