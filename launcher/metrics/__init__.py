"""Reads what ranks measured. Never what was predicted."""
