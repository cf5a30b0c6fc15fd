"""One way to spread the work for each axis of the mesh: a folder each, its planning half in `plan`."""
