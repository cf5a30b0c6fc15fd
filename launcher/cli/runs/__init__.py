"""Verbs about runs: start one, look at it, end it."""
