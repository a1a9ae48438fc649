"""What an engine reports: records of requests, counts for metrics, and its health."""
