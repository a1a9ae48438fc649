"""Builds pods and the workloads that run them."""
