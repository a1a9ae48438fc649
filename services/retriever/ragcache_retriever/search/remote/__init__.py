"""Vector indexes in other services, which are searched with growing effort."""
