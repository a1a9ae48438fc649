"""Clients of the cache store, and what both ends of its data transports share."""
