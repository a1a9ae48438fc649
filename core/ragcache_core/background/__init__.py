"""Prefills ahead of questions: their queue, their sequences, and the gaps that they fit in."""
