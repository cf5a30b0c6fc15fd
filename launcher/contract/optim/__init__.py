"""The optimizer: its settings, and what the author of one implements."""
