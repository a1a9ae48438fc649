"""What the stores in SQLite and PostgreSQL have in common. Their SQL is in their own folders."""
