"""Consecutive layers on each rank."""
