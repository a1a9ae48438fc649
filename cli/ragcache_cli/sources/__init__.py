"""Reads documents from folders, the web and git into local files, and syncs them to a collection.

Sources are not trusted: their content never names a local path, never exceeds its share of the
scratch folder, and is never executed.
"""
