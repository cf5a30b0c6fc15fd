"""The speedup and where the rest went, from stored runs: numbers in `speedup`, their cells in `tables`."""
