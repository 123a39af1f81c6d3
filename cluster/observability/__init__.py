"""Metrics, the Prometheus page, logs, and predicted step times."""
