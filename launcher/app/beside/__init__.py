"""What runs beside the ranks of a run: gives its events to a command, and its figures to Prometheus."""
