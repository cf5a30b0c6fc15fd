"""Sizes: ranks, batch and layers over ranks, solved from what was given."""
