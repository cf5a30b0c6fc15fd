"""The speedup and where the rest went, from stored runs. Starts nothing."""
