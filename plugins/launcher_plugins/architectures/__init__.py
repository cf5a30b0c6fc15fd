"""Who owns the parameters, and how gradients reach them: a folder each, its planning half in `plan`."""
