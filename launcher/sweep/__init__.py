"""Sweeps: several runs of one recipe, each with values of its own."""
