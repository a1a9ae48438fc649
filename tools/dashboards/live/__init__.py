"""What the check runs: Prometheus, a platform under load, and an operator."""
