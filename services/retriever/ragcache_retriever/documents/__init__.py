"""Documents and their chunks: how they are split, how they are stored, and which keys they have."""
