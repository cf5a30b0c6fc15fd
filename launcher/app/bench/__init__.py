"""Measurements as jobs: started here or by a scheduler, and waited for."""
