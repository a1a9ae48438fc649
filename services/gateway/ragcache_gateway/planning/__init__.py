"""Keeps the view of the caches, and chooses order and engine of a request from it."""
