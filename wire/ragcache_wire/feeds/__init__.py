"""Feeds of the cache view: messages, their order, and who may read them."""
