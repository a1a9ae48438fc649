"""Builds the objects of each component: gateway, retriever, engines and cache store."""
