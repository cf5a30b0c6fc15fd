"""Verbs about machines and clusters."""
