"""Ways of spreading the work along one mesh axis."""
