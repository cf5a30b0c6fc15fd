"""What the ranks measure: its format, and its reading."""
