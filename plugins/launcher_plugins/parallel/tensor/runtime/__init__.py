"""Tensor-parallel layers and their collectives, on the ranks."""
