"""Schedules and timelines as text, pictures and files."""
