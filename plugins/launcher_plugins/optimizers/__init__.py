"""Optimizers, one per module, and in one what their ranks run."""
