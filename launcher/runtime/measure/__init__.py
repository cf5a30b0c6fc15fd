"""Clocks, memory and collectives, measured. Never a prediction."""
