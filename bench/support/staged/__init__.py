"""Staged vector search: generated vectors, traces of scans, and rules that stop a scan early."""
