"""Client of the Kubernetes API for the operator and the CLI. Objects are plain dictionaries."""
