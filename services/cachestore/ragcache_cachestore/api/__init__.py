"""The servers of a cache store: gRPC calls, and value transfers over the data transports."""
