"""Derives conditions, phase and Events of a RagCache from what the operator observes."""
