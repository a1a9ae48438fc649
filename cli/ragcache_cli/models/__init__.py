"""Bundled models: which ones exist, and how to fetch, convert, check and cache them."""
