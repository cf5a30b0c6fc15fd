"""The Slurm executor: options, script, states and continuation of a job."""
