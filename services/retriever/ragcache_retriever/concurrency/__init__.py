"""Threads, queues and limits that the knowledge base uses."""
