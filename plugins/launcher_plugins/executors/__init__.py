"""Who reserves the machines and starts the processes."""
