"""Samples, tokens and the microbatches made of them."""
