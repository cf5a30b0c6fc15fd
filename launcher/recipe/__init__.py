"""Recipes as text: listing them, and showing where each value comes from."""
