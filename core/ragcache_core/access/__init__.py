"""Who asks: API keys, and what a caller may do."""
