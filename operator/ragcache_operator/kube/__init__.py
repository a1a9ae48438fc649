"""The Kubernetes API as the operator and the cli use it: plain objects in, plain objects out."""
