"""Executors, one per module or folder: they reserve machines and start the ranks."""
