"""What a run depends on beside its settings, as digests: its data, and the user's own code."""
