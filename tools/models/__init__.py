"""Checks which families of models blend, reuse exact prefixes only, or are refused."""
