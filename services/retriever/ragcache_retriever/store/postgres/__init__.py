"""Documents in PostgreSQL, which any number of retrievers may use."""
