"""Builds single Kubernetes objects, one module for each kind."""
