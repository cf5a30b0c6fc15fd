"""Orders of forwards and backwards, a page each."""
