"""The directory of a run and the states of its job, on the machine that starts it. No torch."""
