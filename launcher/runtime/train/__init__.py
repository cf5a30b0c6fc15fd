"""The training loop, the executor of schedules and the native update."""
