"""The commands that talk to a Kubernetes cluster."""
