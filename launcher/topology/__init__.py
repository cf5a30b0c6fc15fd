"""The machines, and the ranks laid out on them."""
