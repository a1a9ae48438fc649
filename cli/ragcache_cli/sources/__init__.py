"""Reads documents from folders, the web and git into local files, and plans their sync.

Sources are not trusted: their content never names a local path, never exceeds its share of the
scratch folder, and is never executed.
"""
