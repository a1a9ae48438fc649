"""The commands for documents, collections and backups."""
