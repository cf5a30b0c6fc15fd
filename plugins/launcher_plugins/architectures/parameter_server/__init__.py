"""Servers that hold the parameters, and workers that push gradients and pull them."""
