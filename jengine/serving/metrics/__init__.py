"""Prometheus metrics and their server."""
