"""Telemetry of a run: events, spans, annotations and Prometheus targets."""
