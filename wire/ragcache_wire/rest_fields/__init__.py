"""Types of the fields of requests in the REST API, which the gateway and the CLI read alike."""
