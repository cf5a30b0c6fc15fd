"""Executors: they reserve machines and start the ranks."""
