"""Files around the database: its lock, the reserve, backups and recovery."""
