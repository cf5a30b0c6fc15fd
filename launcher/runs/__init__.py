"""The directory of a run and the life of its job, on the machine that starts it. No torch."""
