"""Workers and servers on the ranks."""
