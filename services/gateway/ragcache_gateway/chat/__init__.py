"""A question from request to answer. ``pipeline`` shows the way in order."""
