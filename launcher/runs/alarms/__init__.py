"""The events that the launcher writes, and the user's command that is given all of them."""
