"""HTTP clients of the gateway's REST API."""
