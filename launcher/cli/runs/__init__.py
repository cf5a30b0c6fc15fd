"""Verbs about runs and sweeps: start one, look at it, end it."""
