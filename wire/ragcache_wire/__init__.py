"""The gRPC protocols between the parts: generated code, typed clients, one way to serve.

Clients turn gRPC statuses back into ragcache_core.errors, so no other package handles them.
"""
