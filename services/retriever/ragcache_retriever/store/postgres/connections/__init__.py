"""Connections to PostgreSQL, and the types of their parameters."""
