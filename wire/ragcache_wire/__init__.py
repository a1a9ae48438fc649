"""The gRPC protocols between the services: generated code, typed clients, the server.

Clients turn gRPC statuses into ragcache_core.errors, so no other package handles statuses.
"""

import os

# Else gRPC logs a line for each connection of a stranger that fails in its TLS handshake.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
