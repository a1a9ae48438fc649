"""The gRPC protocols between the services: generated code, typed clients, the server.

Clients turn gRPC statuses into ragcache_core.errors, so no other package handles statuses.
"""
