"""Documents and what follows from a change: events, invalidation of stored KV, deletes."""
