"""A Kubernetes control plane on this machine: an API server with certificates and controllers."""
