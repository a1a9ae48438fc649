"""Models that order the best candidates of a search again."""
