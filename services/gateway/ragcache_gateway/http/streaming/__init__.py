"""Responses that are written as they arrive."""
