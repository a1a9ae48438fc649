"""Generated from wire/proto/ragcache/v1 by tools/generate_wire.py."""
