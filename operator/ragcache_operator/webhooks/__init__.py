"""Admission webhooks of RagCaches and RagCollections, and their certificate."""
