"""Transports that carry values between a client and a cache store: shared memory, TCP and gRPC.

The modules for framing, shared memory and the status page are also used by the store.
"""
