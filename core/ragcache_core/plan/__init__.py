"""Reuse plans: how a gateway asks an engine to reuse KV, and how the engine verifies it."""
