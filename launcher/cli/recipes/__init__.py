"""Verbs about recipes."""
