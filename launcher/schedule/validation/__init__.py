"""Whether action lists are complete, in order, and free of deadlock."""
