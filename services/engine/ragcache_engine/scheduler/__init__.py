"""The connector's scheduler half: it decides what each request loads and saves."""
