"""Who owns the parameters, and how gradients reach them."""
