"""Builders of the components: gateway, retriever, engines and cache store."""
