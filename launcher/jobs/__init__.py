"""Jobs as text, and the run directories they live in."""
