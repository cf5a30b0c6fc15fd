"""No server: gradients meet in one all-reduce, flat or by node."""
