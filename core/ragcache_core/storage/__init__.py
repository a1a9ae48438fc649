"""Allocation of space in the tiers of a cache store."""
