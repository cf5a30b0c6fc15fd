"""What the measurements say."""
