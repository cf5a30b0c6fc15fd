"""Verbs about recipes, which start nothing."""
