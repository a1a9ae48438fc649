"""The counters of a store, and their export over OTLP."""
