"""Who reserves machines and starts the ranks."""
