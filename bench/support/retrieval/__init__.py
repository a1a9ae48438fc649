"""Test collections for the quality of retrieval, and how it is measured."""
