"""Specs of single components that are too large for the module of the RagCache."""
