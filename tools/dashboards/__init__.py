"""Grafana dashboards, recording rules and alerts, built from the metrics catalogue."""
