"""The REST interface: routes, middleware, error bodies and streams."""
