"""Benchmarks: programs with ``--quick`` that print one JSON object last, and what they share."""
