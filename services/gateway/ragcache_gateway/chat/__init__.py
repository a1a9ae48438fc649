"""Chat requests: their schema, and what ``pipeline`` needs to answer them."""
