"""Pipeline schedules, one per module."""
