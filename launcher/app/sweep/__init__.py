"""Sweeps: their points, the directory that holds them, how they are started, their results."""
