"""Recompute tokens of reused chunks through vLLM's own model, and measure attention in it."""
