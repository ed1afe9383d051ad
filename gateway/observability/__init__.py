"""What operators see of each request beside its log line: Prometheus metrics, OpenTelemetry traces."""
