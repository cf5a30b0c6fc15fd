"""Slurm: options, script, state and life of a job."""
