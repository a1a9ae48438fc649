"""Threads and locks that the knowledge base uses."""
