"""Verbs about plans, which start nothing."""
