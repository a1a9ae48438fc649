"""Traces and contestants for the order of documents in prompts."""
