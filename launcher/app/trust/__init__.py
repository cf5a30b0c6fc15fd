"""Runs and reads what a recipe names only where the reader trusts its folder: asked once, and remembered."""
