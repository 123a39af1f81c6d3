"""Metrics, their Prometheus page, logs, and the predicted times of steps."""
