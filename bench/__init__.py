"""Benchmarks: each module is a program with ``--quick`` that prints one JSON object last."""
