"""Split layers and their collectives, on the ranks."""
