"""The operator: typed specs, builders of Kubernetes objects, and the process that reconciles them.

The operator is not in the data path. ``ragcache up`` uses the same builders on a local machine.
"""
