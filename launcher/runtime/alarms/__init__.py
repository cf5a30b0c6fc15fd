"""What the ranks watch while they train: losses, times of steps, and each other."""
