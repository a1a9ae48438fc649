"""Stores that bench/store.py compares, each in a process of its own (worker.py)."""
