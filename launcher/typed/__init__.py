"""Frozen dataclasses from plain values, strictly, with the origin of every fault."""
