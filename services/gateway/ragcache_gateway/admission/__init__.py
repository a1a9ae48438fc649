"""Decides whether a request is served now: limits on latency, and how a refusal becomes a response.

Every refusal is a ``Refused``. A module of this package decides for one kind of limit and raises
it; ``http/errors.py`` makes the response.
"""
