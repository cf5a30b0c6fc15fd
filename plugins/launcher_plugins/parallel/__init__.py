"""One way to spread the work for each axis of the mesh."""
