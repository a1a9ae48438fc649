"""Metrics of every part: one catalogue, recorded once, read by Prometheus and sent over OTLP.

Nothing here imports gRPC, and only ``otlp_exporter`` imports the SDK of OpenTelemetry.
"""
