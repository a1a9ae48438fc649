"""KV values as bytes: layout, checksums, conversion to messages, and values on their way."""
