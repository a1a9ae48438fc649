"""``ragcache size``: what a platform needs for a model, its documents and its traffic."""
