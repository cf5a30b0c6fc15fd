"""Trireme: plans, launches and explains training across many devices."""
