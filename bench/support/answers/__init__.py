"""Parts of the benchmark of right answers."""
