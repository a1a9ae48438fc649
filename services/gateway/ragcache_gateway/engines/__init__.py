"""The engines: which there are, which one answers, and how a completion is read."""
