"""Order of background work: the queue of prefills to precompute."""
