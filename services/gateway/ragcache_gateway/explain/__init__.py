"""Explains answers: where the KV of each part of a prompt came from, and what it cost."""
